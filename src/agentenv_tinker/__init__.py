"""Trains a language model with Tinker on the tasks of an AgentEnv bundle."""
