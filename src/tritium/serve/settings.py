"""The settings of the HTTP side: keys, limits and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from tritium.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `build_app`. The defaults suit one user on one machine."""

    # Without keys every request is accepted: bind to 127.0.0.1 then.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # Values of the header `Host` that are accepted; empty for all. Against DNS rebinding on a loopback address.
    hosts: tuple[str, ...] = ()
    # Other names that requests may use for a model, such as "gpt-image-1".
    aliases: dict[str, str] = field(default_factory=dict)
    # The largest body of a request, one upload, and the pixels of one upload.
    max_body_bytes: int = 64 * MIB
    max_json_bytes: int = MIB
    max_upload_bytes: int = 50 * MIB
    max_mask_bytes: int = 4 * MIB
    max_pixels: int = 32 * 1000 * 1000
    max_images: int = 10
    # Seconds that a job may take at most, and those of a job that its client does not wait for.
    timeout: float = 600.0
    background_timeout: float = 3600.0
    # How long results of background jobs and of idempotency keys are kept, and how many bytes of them.
    keep_seconds: float = 3600.0
    keep_bytes: int = 1024 * MIB
    # Seconds that a job with an idempotency key goes on without a client, so that a retry finds it.
    grace: float = 10.0
    # Seconds that running jobs have after SIGTERM.
    drain_seconds: float = 60.0
    # Seconds between two signs of life in a stream.
    heartbeat: float = 15.0

    def __post_init__(self) -> None:
        if any(len(key) < 8 for key in self.api_keys):
            raise ConfigError("an API key has fewer than 8 characters: choose a longer one")
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        for name, value in numbers.items():
            if value < 0 or (value == 0 and name not in ("grace", "drain_seconds")):
                raise ConfigError(f"setting {name} is {value}: it must be above 0")
