"""The errors a client can be answered with, by HTTP status, and the one that stops the service from starting."""


class ServiceError(Exception):
    """An error whose message is written for the person at the client; `status` is the HTTP status that carries it."""

    status = 500

    @property
    def category(self) -> str:
        """The request error category of the wire format: whose fault it is."""
        return "user" if self.status < 500 else "server"


class InvalidRequestError(ServiceError):
    """The request can't be carried out as it is."""

    status = 400


class UnauthorizedError(ServiceError):
    """The key is missing or is not one this service accepts."""

    status = 401


class ForbiddenError(ServiceError):
    """The address of a file is not one this service gave, or no longer."""

    status = 403


class NotFoundError(ServiceError):
    """What the request names does not exist here."""

    status = 404


class ConflictError(ServiceError):
    """What the request would create exists already."""

    status = 422  # not 409, which the SDK takes as an invitation to try again


class GoneError(ServiceError):
    """What the request names existed once and can't be used any more."""

    status = 404  # not 410, which the SDK takes as a lost future and sends again


class TooLargeError(ServiceError):
    """The body is larger than this service reads."""

    status = 413


class StorageError(ServiceError):
    """The data folder can't be read or written as the request needs."""

    status = 422  # not 507: the SDK tries any 5xx again for minutes

    @property
    def category(self) -> str:
        """The server's fault, whatever the status."""
        return "server"


class NotServedError(ServiceError):
    """The hosted service has this; this one does not."""

    status = 501


class WorkerDiedError(ServiceError):
    """The thread that owns the model has stopped, so nothing can run until the service is restarted."""

    status = 503


class StartupError(Exception):
    """The service can't start as it was asked to; the message is one line for the terminal."""
