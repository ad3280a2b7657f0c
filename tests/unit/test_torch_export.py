"""Exported programs: described, kept apart from their weights, and refused where reading would run code."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from scripts.cli import main
from scripts.import_torch_export import NotServable, describe, read_torch_export
from server.families.base import InputError, Instance
from server.families.torch_export import PROGRAM, TorchExport
from server.families.torch_export.archive import ProgramRefused, check_archive, is_arithmetic
from server.generation import Generation
from tests.programs import FEATURES, classifier, inputs, save, save_classifier
from weights.store import Store

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("exported") / "classifier.pt2")


@pytest.fixture(scope="module")
def generation(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generation]:
    models = tmp_path_factory.mktemp("store") / "models"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMSERVE_MODELS", str(models))
        assert main(["import", "torch-export", str(saved)]) == 0
    generation = Generation.load(1, Store(models).versions()[0])
    yield generation
    generation.close()


@pytest.fixture(scope="module")
def instance(generation: Generation) -> Instance:
    return generation.build_instances(1, torch.device("cpu"))[0]


def infer(generation: Generation, instance: Instance, x: torch.Tensor, kind: torch.Tensor) -> Any:
    with instance.computing():
        return generation.family.infer(instance, {"x": x, "kind": kind}, {})


def test_the_manifest_describes_the_program(generation: Generation) -> None:
    assert generation.manifest.name == "classifier"
    assert generation.manifest.config == {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": ["d0", FEATURES]},
            {"name": "kind", "datatype": "INT64", "shape": ["d0"]},
        ],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": ["d0", 3]},
            {"name": "best", "datatype": "INT64", "shape": ["d0"]},
        ],
        "dimensions": {"d0": [0, 16]},
    }
    assert generation.manifest.warmup == ({"d0": 4},)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_answer_is_the_modules_own(generation: Generation, instance: Instance, rows: int) -> None:
    x, kind = inputs(rows)
    with torch.inference_mode():
        expected = classifier()(x, kind)
    given = infer(generation, instance, x, kind)
    assert torch.equal(given["logits"], expected["logits"])
    assert torch.equal(given["best"], expected["best"])


def test_no_weight_is_in_the_archive_or_out_of_the_mapping(
    generation: Generation, instance: Instance
) -> None:
    with zipfile.ZipFile(generation.version.path / PROGRAM) as archive:
        sizes = [e.file_size for e in archive.infolist() if "/weights/weight_" in e.filename]
    assert sizes and not any(sizes)
    held = instance.module.state_dict(keep_vars=True)
    assert held and all(generation.mapped.contains(tensor) for tensor in held.values())


@pytest.mark.parametrize(
    ("x", "kind", "field", "limit"),
    [
        (torch.zeros(17, FEATURES), torch.zeros(17, dtype=torch.int64), "x", "0 to 16"),
        (torch.zeros(3, FEATURES), torch.zeros(2, dtype=torch.int64), "kind", "is 2, in another input 3"),
    ],
)
def test_a_shape_the_program_does_not_take_is_the_clients_mistake(
    generation: Generation, instance: Instance, x: torch.Tensor, kind: torch.Tensor, field: str, limit: str
) -> None:
    with pytest.raises(InputError) as error:
        infer(generation, instance, x, kind)
    assert error.value.field == field and limit in error.value.message


def test_declared_limits_are_told_to_the_client(generation: Generation, instance: Instance) -> None:
    config = json.loads(json.dumps(generation.manifest.config))
    config["inputs"][1]["limits"] = [0, 4]
    family = TorchExport(generation.version.path, config)
    x, _ = inputs(2)
    with pytest.raises(InputError, match="kind: a number is outside 0 to 4"):
        family.infer(instance, {"x": x, "kind": torch.tensor([0, 5])}, {})
    family.infer(instance, {"x": x, "kind": torch.tensor([0, 4])}, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["inputs"].pop(),
        lambda config: config["inputs"][0].update(name="y"),
        lambda config: config["outputs"].pop(),
    ],
)
def test_a_manifest_that_describes_another_program_is_refused(generation: Generation, change: Change) -> None:
    config = json.loads(json.dumps(generation.manifest.config))
    change(config)
    with pytest.raises(ProgramRefused, match="config"):
        TorchExport(generation.version.path, config)


def test_joined_requests_get_their_own_rows(generation: Generation, instance: Instance) -> None:
    family = TorchExport(generation.version.path, {**generation.manifest.config, "batch": "d0"})
    assert family.batches
    prepared = [
        family.prepare(dict(zip(("x", "kind"), inputs(rows), strict=True)), {}) for rows in (3, 9, 7, 1)
    ]
    assert len({one.key for one in prepared}) == 1
    with instance.computing():  # 20 rows, where the program takes 16 at most
        results = family.infer_batch(instance, [one.content for one in prepared])
    for one, result in zip(prepared, results, strict=True):
        expected = classifier()(*one.content.values())
        assert torch.allclose(result["logits"], expected["logits"], atol=1e-6)  # type: ignore[arg-type]
        assert torch.equal(result["best"], expected["best"])  # type: ignore[arg-type]


def test_requests_are_joined_only_where_the_version_says_so(generation: Generation, saved: Path) -> None:
    assert not generation.family.batches  # type: ignore[attr-defined]
    assert read_torch_export(saved, batch=True).config["batch"] == "d0"
    with pytest.raises(ProgramRefused, match=r"config\.batch"):
        TorchExport(generation.version.path, {**generation.manifest.config, "batch": "d1"})


def test_a_program_whose_output_has_no_rows_cannot_be_joined(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    file = save(tmp_path / "mean.pt2", Mean(), (torch.zeros(3),), dynamic_shapes=dynamic)
    with pytest.raises(NotServable, match="joined"):
        read_torch_export(file, batch=True)


class Counter(nn.Module):
    """Writes to a buffer through a view of it."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[0] += 1
        return x + self.seen


class Structured(nn.Module):
    """Takes a constant besides its tensors, and gives a nest of them; writes to memory of its own."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], mode: str, *, factor: float = 1.0) -> Any:
        total = pair[0].clone()
        total.add_(pair[1])
        return total * factor, {"more": [total + (1 if mode == "up" else -1)]}


class Even(nn.Module):
    """Takes an even number of columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, ::2] * 2


@pytest.mark.parametrize("module", [Counter(), nn.BatchNorm1d(2)])
def test_a_program_that_writes_to_its_weights_is_not_imported(module: nn.Module, tmp_path: Path) -> None:
    file = save(tmp_path / "writes.pt2", module.train(), (torch.zeros(3, 2),))
    with pytest.raises(NotServable, match=r"writes to .*(seen|running_mean)"):
        read_torch_export(file)


def test_structured_arguments_and_constants_are_served_as_plain_tensors(tmp_path: Path) -> None:
    pair = (torch.ones(2), torch.full((2,), 2.0))
    save(tmp_path / PROGRAM, Structured(), (pair, "up"), kwargs={"factor": 3.0})
    found = read_torch_export(tmp_path / PROGRAM)
    (tmp_path / PROGRAM).write_bytes(found.assets[PROGRAM])  # type: ignore[arg-type]
    family = TorchExport(tmp_path, found.config)
    instance = Instance(family.build(), torch.device("cpu"), 0)
    assert [spec.name for spec in family.outputs] == ["output_0", "output_1_more_0"]
    first, second = (spec.name for spec in family.inputs)
    given = family.infer(instance, {first: pair[0], second: pair[1]}, {})
    assert given["output_0"].tolist() == [9.0, 9.0]
    assert given["output_1_more_0"].tolist() == [4.0, 4.0]


def test_a_derived_size_is_checked_by_the_program(tmp_path: Path) -> None:
    half = torch.export.Dim("half", max=20)
    save(tmp_path / PROGRAM, Even(), (torch.zeros(2, 8),), dynamic_shapes={"x": {1: 2 * half}})
    found = read_torch_export(tmp_path / PROGRAM)
    assert found.config["dimensions"] == {"d0": [0, 40]} and found.warmup == ({"d0": 8},)
    (tmp_path / PROGRAM).write_bytes(found.assets[PROGRAM])  # type: ignore[arg-type]
    family = TorchExport(tmp_path, found.config)
    instance = Instance(family.build(), torch.device("cpu"), 0)
    assert family.infer(instance, {"x": torch.ones(2, 6)}, {})["output"].shape == (2, 3)
    with pytest.raises(InputError, match="2"):
        family.infer(instance, {"x": torch.ones(2, 7)}, {})


def test_a_program_of_numbers_is_not_imported(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x * 2, x.shape[0]

    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Sized(), (torch.zeros(3),), dynamic_shapes=dynamic)
    with pytest.raises(NotServable, match="output_1 is no tensor"):
        describe(program)


# ---- archives from strangers ----------------------------------------------------------------------


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def rewritten(archive: Path, name: str, change: Callable[[bytes], bytes]) -> io.BytesIO:
    """Return *archive* with one entry changed, or with one more."""
    found = io.BytesIO()
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(found, "w") as target:
        top = source.namelist()[0].partition("/")[0]
        for entry in source.namelist():
            if entry != f"{top}/{name}":
                target.writestr(entry, source.read(entry))
        before = source.read(f"{top}/{name}") if f"{top}/{name}" in source.namelist() else b""
        target.writestr(f"{top}/{name}", change(before))
    return found


def in_json(change: Change) -> Callable[[bytes], bytes]:
    def apply(raw: bytes) -> bytes:
        table = json.loads(raw)
        change(table)
        return json.dumps(table).encode()

    return apply


def first_payload(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(table["config"].values()))
    return found


def node(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = table["graph_module"]["graph"]["nodes"][0]
    return found


def sizes(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = table["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]
    return found


def out_spec(table: dict[str, Any], **spec: Any) -> None:
    text = json.dumps([1, {**spec, "children_spec": []}])
    table["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = text


CODE = "__import__('os').system('true')"
WEIGHTS = "data/weights/model_weights_config.json"
GRAPH = "models/model.json"
HOSTILE: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("data/sample_inputs/model.pt", lambda _: pickle.dumps(Bomb(Path("unpickled")))),
    (WEIGHTS, in_json(lambda table: first_payload(table).update(use_pickle=True))),
    (WEIGHTS, in_json(lambda table: first_payload(table).pop("use_pickle"))),
    ("data/constants/model_constants_config.json",
     in_json(lambda table: first_payload(table).update(path_name="custom_obj_0"))),
    ("data/constants/opaque_obj_0", lambda _: b""),
    ("data/weights/model.pt", lambda _: b""),  # the older form, a pickle
    ("data/aotinductor/model/model.so", lambda _: b""),
    ("extra/note", lambda _: b""),
    (GRAPH, in_json(lambda table: node(table).update(target="torch.os.system"))),
    (GRAPH, in_json(lambda table: node(table).update(target="torch.ops.load_library"))),
    (GRAPH, in_json(lambda table: node(table).update(target="torch.ops.aten.from_file.default"))),
    (GRAPH, in_json(lambda table: node(table).update(target="#fbgemm:op"))),
    (GRAPH, in_json(lambda table: sizes(table).update(expr_str=CODE))),
    (GRAPH, in_json(lambda table: table.update(guards_code=[f"L['x'].size()[0] == {CODE}"]))),
    (GRAPH, in_json(lambda table: out_spec(table, type="collections.defaultdict", context="{}"))),
    (GRAPH, in_json(lambda table: out_spec(table, type="builtins.dict", context='[{"__enum__": true}]'))),
    (GRAPH, lambda _: b"{" * 100_000),
    (GRAPH, lambda _: b"[" * 100_000),
    (GRAPH, lambda _: b"\xff"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), HOSTILE)
def test_an_archive_that_would_run_code_is_refused(
    generation: Generation, name: str, change: Callable[[bytes], bytes]
) -> None:
    sound = generation.version.path / PROGRAM
    check_archive(sound)
    with pytest.raises(ProgramRefused):
        check_archive(rewritten(sound, name, change))


def test_importing_unpickles_nothing(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = tmp_path / "exploded"
    file = tmp_path / "strange.pt2"
    pickled = pickle.dumps(Bomb(bomb))
    file.write_bytes(rewritten(saved, "data/sample_inputs/model.pt", lambda _: pickled).getvalue())
    read_torch_export(file)  # examples are left out unread
    file.write_bytes(rewritten(saved, "data/weights/model.pt", lambda _: pickled).getvalue())
    assert main(["import", "torch-export", str(file)]) == 1
    assert "data/weights/model.pt" in capsys.readouterr().err
    assert not bomb.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_archive_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "broken.pt2"
    file.write_bytes(content)
    assert main(["import", "torch-export", str(file)]) == 1
    assert "broken.pt2" in capsys.readouterr().err


def test_truncated_archives_are_refused(saved: Path) -> None:
    raw = saved.read_bytes()
    for end in np.linspace(0, len(raw) - 1, 25, dtype=int):
        with pytest.raises(ProgramRefused):
            check_archive(io.BytesIO(raw[:end]))


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s72', positive=True, integer=True)",
        "Add(Mul(Integer(2), Symbol('s3', integer=True)), Integer(-1))",
        "L['x'].size()[0] == 2*L['kind'].size()[0]",
        "(s0 // 2) >= 1",
        "Max(1, s0) < 7 and not s1 == 3",
    ],
)
def test_sizes_are_arithmetic(text: str) -> None:
    assert is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        "().__class__.__base__",
        "open('x')",
        "eval('1')",
        "Symbol('1 + exit()')",
        "L['x'].numpy()",
        "[x for x in L]",
        "lambda: 0",
        "(x := 1)",
        "f'{L}'",
        "s0; s1",
        "S0.real",
        "",
        "(" * 300,
    ],
)
def test_code_is_no_arithmetic(text: str) -> None:
    assert not is_arithmetic(text)
