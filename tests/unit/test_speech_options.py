"""A family's own fields of a request, through every door: speech route, tensors, warm-up inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flask.testing import FlaskClient

from server.families.base import InputError
from tests.apps.tone.tone import RATE
from tests.unit.served import app_for_tone

SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}
TEXT = [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    return app_for_tone().test_client()


def pitch(samples: Any) -> float:
    """Return the strongest frequency in Hz."""
    spectrum = np.abs(np.fft.rfft(np.asarray(samples, np.float64)))
    return float(np.argmax(spectrum)) * RATE / len(samples)


@pytest.mark.parametrize(("fields", "hz"), [({}, 440), ({"octave": 1}, 880), ({"octave": -1}, 220)])
def test_an_option_is_a_field_of_the_speech_route(
    client: FlaskClient, fields: dict[str, int], hz: int
) -> None:
    answer = client.post("/v1/audio/speech", json=SPEECH | fields)
    assert answer.status_code == 200
    assert pitch(np.frombuffer(answer.data, "<i2")) == pytest.approx(hz, abs=10)


@pytest.mark.parametrize("octave", [3, "1", 1.5, None, True])
def test_the_speech_route_names_an_option_that_is_out_of_range(client: FlaskClient, octave: Any) -> None:
    answer = client.post("/v1/audio/speech", json={**SPEECH, "octave": octave})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "octave"


def test_an_option_is_a_parameter_of_an_inference_request(client: FlaskClient) -> None:
    answer = client.post("/v2/models/tone/infer", json={"inputs": TEXT, "parameters": {"octave": 1}})
    assert pitch(answer.json["outputs"][0]["data"]) == pytest.approx(880, abs=10)


def test_an_inference_request_is_told_which_parameter_is_out_of_range(client: FlaskClient) -> None:
    answer = client.post("/v2/models/tone/infer", json={"inputs": TEXT, "parameters": {"octave": 3}})
    assert answer.status_code == 400
    assert answer.json["error"].startswith("octave: ")


def test_a_warm_up_input_may_hold_options(client: FlaskClient) -> None:
    served: Any = client.application.config["SERVED"]
    with served.pool.lease(timeout_s=1) as instance:
        outputs = served.family.rehearse(instance, {"text": "hello", "octave": 1})
        assert pitch(outputs["audio"]) == pytest.approx(880, abs=10)
        with pytest.raises(InputError):
            served.family.rehearse(instance, {"text": "hello", "octave": 3})
