"""Settings from WARMSERVE_* variables and an optional KEY=VALUE file; every mistake in one report.

The only file that reads the environment. Each field carries its unit, limit and meaning.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from dotenv.parser import parse_stream
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from server.keys import ApiKey, read_keys

PREFIX = "WARMSERVE_"
FILE_VARIABLE = "WARMSERVE_ENV_FILE"
SMALLEST_CACHE = 1 << 20  # the store's own index takes some of it
SHOWN_CHARS = 80  # of a wrong value, in a message
# What gunicorn takes; a port alone would bind every interface, so a host is asked for.
ADDRESS = re.compile(r"unix:.+|fd://\d+|(tcp://)?(\[[0-9a-fA-F:.%]+\]|[^\s:/,]+)(:\d+)?")

BYTES = re.compile(r"\d+(?:\.\d+)? ?[A-Za-z]*", re.ASCII)  # what ByteSize reads, and nothing after it
PERCENT = re.compile(r"(\d{1,2}(?:\.\d+)?|100)%", re.ASCII)


class SettingsError(Exception):
    """Some settings are wrong; the message lists all of them."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("\n".join(["settings are wrong:", *(f"  {mistake}" for mistake in mistakes)]))
        self.mistakes = mistakes


class Settings(BaseModel):
    """One field a setting; the variable is ``WARMSERVE_`` and the name in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bind: str = Field(
        "127.0.0.1:8000",
        description="data addresses: host:port, unix:path or fd://N, with commas; the first is served first",
    )
    admin_bind: str = Field("127.0.0.1:8001", description="admin address: host:port, unix:path or fd://N")
    workers: int = Field(2, ge=1, le=250, description="worker processes")
    pool_size: int = Field(1, ge=1, le=64, description="model instances in each worker")
    models: Path = Field(Path("models"), description="directory of the versions")
    run_dir: Path = Field(Path("run"), description="directory for the board, the metrics and the quarantine")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+(,\d+)*)?)$",
        description="where models compute: auto (every GPU, if any), cpu, cuda, or by NVML's index cuda:0,1",
    )
    torch_threads: int = Field(
        0, ge=0, le=1024, description="threads of one worker's model; 0 is its share of the cores"
    )
    boot_timeout_s: float = Field(
        120, gt=0, le=86400, description="seconds to check a version, and for a worker to get ready"
    )
    request_timeout_s: float = Field(
        60, gt=0, le=86400, description="seconds to compute a request, its wait for an instance included"
    )
    max_queue: int = Field(
        64, ge=0, le=65535, description="connections that wait in the accept queue before 503"
    )
    max_batch: int = Field(
        8, ge=1, le=256, description="requests computed in one pass, where the family can; 1: never together"
    )
    max_batch_delay_ms: float = Field(
        0, ge=0, le=1000, description="milliseconds a request waits for others to share its pass"
    )
    cache_bytes: int = Field(
        0, ge=0, description="bytes of finished responses that are kept, for all workers; 0: none"
    )
    max_input_chars: int = Field(4096, ge=1, le=4096, description="characters of text in one request")
    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30, description="bytes of a request's body")
    api_keys_file: Path | None = Field(
        None, description="file of the API keys, of which each request then needs one; none: all may ask"
    )
    read_timeout_s: float = Field(10, gt=0, le=3600, description="seconds for a client to send its request")
    send_timeout_s: float = Field(
        30, ge=1, le=3600, description="seconds without progress before a reader is dropped"
    )
    drain_timeout_s: int = Field(
        30, ge=1, le=86400, description="seconds for a leaving worker to finish its requests"
    )
    surge: int = Field(
        1, ge=0, le=64, description="extra workers during a swap; 0 drains one before starting one"
    )
    allow_gap: bool = Field(
        False, description="allow a swap that leaves no ready worker (SURGE=0, one worker)"
    )
    min_ready: int = Field(1, ge=1, le=250, description="ready workers below which /readyz says 503")
    crash_limit: int = Field(
        3, ge=1, le=1000, description="deaths within CRASH_WINDOW_S that roll a version back"
    )
    crash_window_s: float = Field(60, gt=0, le=86400, description="seconds in which CRASH_LIMIT deaths count")
    memory_limit_bytes: int = Field(
        0, ge=0, description="bytes a swap may hold, old and new; 0 is the cgroup's or the machine's"
    )
    worker_memory_limit: str = Field(
        "0",
        description="memory of its own at which a worker is replaced: 512MiB, 10%; 0: never",
    )
    device_memory_limit: str = Field(
        "0", description="device memory at which a worker is replaced: 8GiB, 50% of the device; 0: never"
    )
    device_memory_drift: str = Field(
        "200MB", description="growth of a worker's device memory since warm-up that is reported; 0: never"
    )
    max_requests: int = Field(
        0, ge=0, le=10**9, description="requests after which a worker is replaced; 0: never"
    )
    max_requests_jitter: int = Field(
        0, ge=0, le=10**9, description="at most so many more, so that workers do not leave together"
    )
    keepalive_s: float = Field(
        600, ge=0, le=86400, description="idle seconds after which an instance runs a warm-up input; 0: never"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of the log lines")
    tracing: bool = Field(False, description="send OpenTelemetry spans to the collector that OTEL_* names")

    @field_validator("bind", "admin_bind")
    @classmethod
    def _check_address(cls, value: str, found: ValidationInfo) -> str:
        parts = [part.strip() for part in value.split(",")]
        if found.field_name == "admin_bind" and len(parts) > 1:
            raise ValueError("must be one address")
        for part in parts:
            port = re.fullmatch(r".*:(\d+)", part)
            if not ADDRESS.fullmatch(part) or (port and int(port[1]) > 65535):
                raise ValueError("must be host:port (port 0 to 65535), unix:path or fd://N")
        if set(parts) & set(str(found.data.get("bind", "")).split(",")):
            raise ValueError("must differ from WARMSERVE_BIND")
        return ",".join(parts)

    @field_validator("worker_memory_limit", "device_memory_limit", "device_memory_drift")
    @classmethod
    def _check_memory(cls, value: str) -> str:
        if PERCENT.fullmatch(value):
            return value
        try:
            TypeAdapter(ByteSize).validate_python(value if BYTES.fullmatch(value) else "")
        except ValidationError:
            raise ValueError("must be bytes (1500000000, 1500MB, 1.5GiB) or a percentage (10%)") from None
        return value

    @field_validator("tracing")
    @classmethod
    def _check_installed(cls, value: bool) -> bool:
        if value and importlib.util.find_spec("opentelemetry") is None:
            raise ValueError("needs the OpenTelemetry packages: pip install 'warmserve[tracing]'")
        return value

    @field_validator("cache_bytes")
    @classmethod
    def _check_cache(cls, value: int) -> int:
        if 0 < value < SMALLEST_CACHE:
            raise ValueError(f"must be 0 or at least {SMALLEST_CACHE}")
        if value and importlib.util.find_spec("diskcache") is None:
            raise ValueError("needs the package diskcache: pip install 'warmserve[cache]'")
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _check_keys(cls, value: Path | None) -> Path | None:
        if value is not None:
            read_keys(value)
        return value

    @cached_property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """The keys as the file had them when they were first asked for."""
        return read_keys(self.api_keys_file) if self.api_keys_file is not None else ()

    @field_validator("min_ready")
    @classmethod
    def _check_reachable(cls, value: int, found: ValidationInfo) -> int:
        if value > found.data.get("workers", value):
            raise ValueError(f"must be at most WARMSERVE_WORKERS, {found.data['workers']}")
        return value

    @classmethod
    def load(cls) -> Settings:
        """Read the environment and the file that ``WARMSERVE_ENV_FILE`` names; the environment wins.

        Raises:
            SettingsError: with every mistake.
        """
        file = os.environ.get(FILE_VARIABLE)
        values, mistakes = _read_file(file) if file else ({}, [])
        values |= {k: v for k, v in os.environ.items() if k.startswith(PREFIX) and k != FILE_VARIABLE}
        names = {field: PREFIX + field.upper() for field in cls.model_fields}
        mistakes += _unknown(values.keys() - set(names.values()), list(names.values()))
        given = {field: values[variable] for field, variable in names.items() if variable in values}
        try:
            settings = cls.model_validate(given)
        except ValidationError as error:
            mistakes += [_describe(problem) for problem in error.errors()]
        if mistakes:
            raise SettingsError(mistakes)
        _ = settings.api_keys  # now, by the process that may read them: workers may be another user's
        return settings

    @property
    def bind_addresses(self) -> list[str]:
        """The data addresses, as gunicorn takes them."""
        return [part.strip() for part in self.bind.split(",")]

    @property
    def logger_class(self) -> str:
        """The logger that writes lines in LOG_FORMAT."""
        return "server.logs.JsonLogger" if self.log_format == "json" else "server.logs.TextLogger"

    @property
    def threads(self) -> int:
        """Data connections a worker may hold at once: those computing and those still being sent."""
        return self.pool_size * self.max_batch + 63

    def torch_threads_for(self, workers: int, cores: int) -> int:
        """Return TORCH_THREADS, or one worker's share of *cores*, at least 1."""
        return self.torch_threads or max(1, cores // workers)

    def changed_needing_restart(self, before: Settings) -> list[str]:
        """Return the names of changed settings that only a restart applies."""
        return [name.upper() for name in NEED_RESTART if getattr(self, name) != getattr(before, name)]

    def with_restart_values_of(self, before: Settings) -> Settings:
        """Return these settings with those that need a restart as they were."""
        return self.model_copy(update={name: getattr(before, name) for name in NEED_RESTART})


def bytes_of(value: str, whole_bytes: int) -> int:
    """Return a memory setting in bytes, a percentage being one of *whole_bytes*."""
    if percent := PERCENT.fullmatch(value):
        return int(whole_bytes * float(percent[1]) / 100)
    return int(TypeAdapter(ByteSize).validate_python(value))


NEED_RESTART = ("bind", "admin_bind", "models", "run_dir", "device", "log_format")


def _read_file(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the file's pairs and its mistakes; values are taken as they are, without ``${}``."""
    pairs: dict[str, str] = {}
    mistakes = []
    try:
        with open(path, encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except (OSError, UnicodeDecodeError) as error:
        return {}, [f"{FILE_VARIABLE}={path!r}: {error}"]
    for binding in bindings:
        if binding.error or (binding.key and binding.value is None):
            mistakes.append(f"{FILE_VARIABLE}={path!r}: line {binding.original.line} is not KEY=VALUE")
        elif binding.key:
            pairs[binding.key] = binding.value or ""
    return pairs, mistakes


def _unknown(names: set[str], known: list[str]) -> Iterator[str]:
    for name in sorted(names):
        close = difflib.get_close_matches(name, known, 1)
        yield f"{name}: no such setting" + (f"; did you mean {close[0]}?" if close else "")


def _describe(problem: ErrorDetails) -> str:
    field = str(problem["loc"][0])
    value = repr(problem["input"])
    shown = value if len(value) <= SHOWN_CHARS else value[:SHOWN_CHARS] + "..."
    if problem["type"] == "value_error":  # a rule of ours, which names its own limit
        return f"{PREFIX}{field.upper()}={shown}: {problem['msg'].removeprefix('Value error, ')}"
    return f"{PREFIX}{field.upper()}={shown}: {problem['msg']}"
