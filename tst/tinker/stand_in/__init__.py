"""Stand-ins for what a rollout meets outside this package: the model, its renderer, and the sandbox its envs run in.

Episodes themselves are real. Nothing here replaces a part of agentenv_tinker or of the framework's Episode API.
"""
