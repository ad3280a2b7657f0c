"""Documentation is tested: what the code can say or be told, docs/ explains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from scripts import exits
from server import errors, events, rollout
from server.settings import FILE_VARIABLE, Settings
from tests.unit.served import app_for_tone

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs/OPERATIONS.md").read_text()
ARCHITECTURE = (ROOT / "docs/ARCHITECTURE.md").read_text()


def children(root: type[errors.ServingError]) -> list[type[errors.ServingError]]:
    return [root, *(c for child in root.__subclasses__() for c in children(child))]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented_with_its_default_and_meaning(name: str) -> None:
    field = Settings.model_fields[name]
    row = next(line for line in OPERATIONS.splitlines() if line.startswith(f"| `WARMSERVE_{name.upper()}` |"))
    default = str(int(field.default)) if isinstance(field.default, bool) else str(field.default)
    default = "none" if field.default is None else default
    assert f"`{default}`" in row
    assert field.description is not None
    assert field.description in row


def test_the_settings_file_is_documented() -> None:
    assert FILE_VARIABLE in OPERATIONS


@pytest.mark.parametrize("error", children(errors.ServingError))
def test_every_error_code_is_documented_with_its_status(error: type[errors.ServingError]) -> None:
    assert f"| `{error.code}` | {error.status} |" in OPERATIONS


@pytest.mark.parametrize("event", [v for k, v in vars(events).items() if k.isupper()])
def test_every_event_is_documented_and_used(event: str) -> None:
    assert f"| `{event}` |" in OPERATIONS
    name = next(k for k, v in vars(events).items() if v == event)
    sources = [path.read_text() for path in (ROOT / "server").rglob("*.py")]
    assert any(f"events.{name}" in source for source in sources), "no code emits it"


def test_every_endpoint_is_documented() -> None:
    for rule in app_for_tone().url_map.iter_rules():
        path = re.sub(r"<any[^>]*>", "{action}", rule.rule)
        path = re.sub(r"<[^>]*?(\w+)>", "{id}", path)
        if rule.endpoint != "static":
            assert path in OPERATIONS, path


def test_every_endpoint_describes_itself() -> None:
    app = app_for_tone()
    document = app.test_client().get("/openapi.json").json
    assert document is not None
    described = sum(len(methods) for methods in document["paths"].values())
    assert described == len([rule for rule in app.url_map.iter_rules() if rule.endpoint != "static"])


def test_the_page_of_the_interface_loads_nothing_from_elsewhere() -> None:
    page = app_for_tone().test_client().get("/docs")
    assert page.status_code == 200 and page.mimetype == "text/html"
    assert not re.search(r"https?://|src=|@import|url\(", page.text)
    assert "SpeechBody" in page.text and "/v2/models/{model}/infer" in page.text


@pytest.mark.parametrize("path", ["/livez", "/startupz", "/readyz", "/status", "/metrics"])
def test_every_admin_endpoint_is_documented(path: str) -> None:
    assert f"`GET {path}`" in OPERATIONS


def test_every_exit_code_is_documented() -> None:
    for name, code in vars(exits).items():
        if name.isupper():
            assert f"| {code} | " in OPERATIONS


def test_the_swap_table_names_every_action() -> None:
    """The table in the architecture page and `rollout.py` name the same actions."""
    actions = {action.__name__ for action in get_args(rollout.Action)}
    table = ARCHITECTURE[ARCHITECTURE.index("| the snapshot shows") : ARCHITECTURE.index("| anything else")]
    assert set(re.findall(r"`([A-Z]\w+)`", table)) - {"SURGE"} == actions


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
