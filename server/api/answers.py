"""What answers look like, for the description of the interface; routes build the same shapes by hand."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """Why a request was refused. ``code`` is one word, ``param`` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(BaseModel):
    """An error on /v1."""

    error: ErrorDetail


class InferenceError(BaseModel):
    """An error on /v2."""

    error: str


class ModelRow(BaseModel):
    """One model. ``created`` is Unix seconds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelRows(BaseModel):
    """The models of this service."""

    object: Literal["list"]
    data: list[ModelRow]


class VoiceRow(BaseModel):
    """One voice; ``language`` is a BCP 47 tag."""

    id: str
    name: str
    language: str
    description: str


class VoiceRows(BaseModel):
    """The voices of the model."""

    voices: list[VoiceRow]


class EmbeddingRow(BaseModel):
    """One vector: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class TokenUsage(BaseModel):
    """Tokens of the input."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """Vectors in the order of the input."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: TokenUsage


class ServerMetadata(BaseModel):
    """The server and the protocol extensions it has."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """Whether the server is alive."""

    live: bool


class Ready(BaseModel):
    """Whether the server takes requests."""

    ready: bool


class ModelReady(Ready):
    """Whether the model takes requests."""

    name: str


class ModelNames(BaseModel):
    """The models by name."""

    models: list[str]


class TensorMetadata(BaseModel):
    """One input or output; -1 is a size that each request chooses."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelStatistics(BaseModel):
    """What this worker's inferences took, in nanoseconds (Triton's statistics extension)."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: dict[str, dict[str, int]]
    batch_stats: list[dict[str, Any]]


class StatisticsAnswer(BaseModel):
    """The statistics of each model."""

    model_stats: list[ModelStatistics]


class OutputTensor(BaseModel):
    """One output: its elements in ``data``, or behind the JSON in as many bytes as ``parameters`` say."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class InferAnswer(BaseModel):
    """The outputs of one inference."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class IndexRow(BaseModel):
    """One version in the repository."""

    name: str
    version: str
    state: str
    reason: str


class OpenAPIDocument(BaseModel):
    """This description, OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
