"""The example checkpoints: published sizes, files as the safetensors library writes them, values that tell
places.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpoints import (
    FULL,
    SMALL,
    Checkpoint,
    Form,
    Order,
    expected_codes,
    expected_packed,
    expected_scales,
    expected_tensor,
    layers_dims,
    make_config,
    make_layers,
    make_small,
    plan_files,
    random_content,
)
from make_checkpoint import main

PROJECTIONS = ("gate", "up", "down")
DTYPES = {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def read_all(made: Checkpoint) -> dict[str, NDArray[Any]]:
    values = {}
    for name in made.files:
        content = (made.folder / name).read_bytes()
        start, header = read_header(made.folder / name)
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                piece = np.frombuffer(content[start + begin : start + end], np.dtype(DTYPES[entry["dtype"]]))
                values[key] = piece.reshape(entry["shape"])
    return values


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("small"))


# The stand-in is what was published.


def test_standin_totals(standin: Path) -> None:
    index = json.loads((standin / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 595_148_192_736
    assert len(index["weight_map"]) == 208_550
    assert len(set(index["weight_map"].values())) == 64
    text = sum(name.startswith("language_model.") for name in index["weight_map"])
    assert (text, len(index["weight_map"]) - text) == (208_215, 335)


def test_standin_files(standin: Path) -> None:
    sizes, counts = {}, {}
    for path in standin.glob("*.safetensors"):
        start, header = read_header(path)
        sizes[path.name] = path.stat().st_size - start
        counts[path.name] = len(header) - 1
        assert (
            max(entry["data_offsets"][1] for name, entry in header.items() if "." in name) == sizes[path.name]
        )
    names = [f"model-{number:05d}-of-000064.safetensors" for number in range(1, 65)]
    assert sorted(sizes) == names
    assert sizes[names[0]] == 995_000_320
    assert {sizes[name] for name in names[1:61]} == {9_808_554_496}
    assert {counts[name] for name in names[1:61]} == {3_470}
    assert [sizes[name] for name in names[61:]] == [4_697_634_816, 108_555_776, 833_732_064]


def test_standin_takes_no_room(standin: Path) -> None:
    assert sum(path.stat().st_blocks * 512 for path in standin.iterdir()) < 100e6


def test_full_size_config_is_the_published_one() -> None:
    path = Path(__file__).parents[1] / "support" / "k26_config.json"
    assert make_config(FULL) == json.loads(path.read_text())


def test_k2_thinking_has_a_table_more_a_layer() -> None:
    files = plan_files(FULL, "k2-thinking")
    tensors = [tensor for file in files for tensor in file]
    assert len(files) == 62
    assert len(tensors) == 208_276
    assert sum(tensor.nbytes for tensor in tensors) == 594_205_920_512


# Files are what the reference writer makes of the same tensors.


@pytest.mark.parametrize("shape_dtype", ["I32", "I64"])
@pytest.mark.parametrize("form", get_args(Form))
def test_reference_order_is_that_of_the_library(tmp_path: Path, form: Form, shape_dtype: Any) -> None:
    torch = pytest.importorskip("torch", reason="numpy has no bf16 for the library to write")
    save_file = pytest.importorskip("safetensors.torch").save_file
    made = make_small(tmp_path / "made", form=form, shape_dtype=shape_dtype, experts=12, moe_intermediate=64)
    values = read_all(made)
    for name, tensors in made.files.items():
        state = {}
        for tensor in reversed(tensors):
            state[tensor.name] = torch.from_numpy(values[tensor.name].copy())
            if tensor.dtype == "BF16":
                state[tensor.name] = state[tensor.name].view(torch.bfloat16)
        save_file(state, tmp_path / name, metadata={"format": "pt"})
        assert (tmp_path / name).read_bytes() == (made.folder / name).read_bytes()


@pytest.mark.parametrize("split_layer", [False, True])
@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("form", get_args(Form))
def test_the_library_opens_every_form(tmp_path: Path, form: Form, order: Order, split_layer: bool) -> None:
    pytest.importorskip("torch", reason="numpy has no bf16 for the library to read into")
    from safetensors import safe_open

    made = make_small(tmp_path, form=form, order=order, split_layer=split_layer, experts=4)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, tensors in made.files.items():
        with safe_open(tmp_path / name, framework="pt") as file:
            assert set(file.keys()) == {key for key, value in index["weight_map"].items() if value == name}
            for tensor in tensors:
                assert tuple(file.get_tensor(tensor.name).shape) == tensor.shape


def test_values_do_not_depend_on_form_or_order(small: Checkpoint, tmp_path: Path) -> None:
    expected = read_all(small)
    other = read_all(
        make_small(tmp_path, form="k2-thinking", order="shuffled", split_layer=True, shape_dtype="I64")
    )
    shared = {f"language_model.{name}": value for name, value in other.items() if "inv_freq" not in name}
    for name, value in shared.items():
        np.testing.assert_array_equal(value, expected[name])
    assert {name for name in expected if name.startswith("language_model.")} == set(shared)


def test_interleaved_keeps_a_matrix_together(tmp_path: Path) -> None:
    made = make_small(tmp_path, order="interleaved", experts=12)
    experts = [tensor for tensor in made.files["model-00002-of-000006.safetensors"] if tensor.expert >= 0]
    assert [tensor.expert for tensor in experts] == [expert for expert in range(12) for _ in range(9)]
    assert [tensor.name.rpartition("_")[2] for tensor in experts] == ["packed", "scale", "shape"] * 36


def test_shuffled_has_three_orders(tmp_path: Path) -> None:
    made = make_small(tmp_path, order="shuffled")
    for name, tensors in made.files.items():
        _, header = read_header(tmp_path / name)
        by_offset = [tensor.name for tensor in tensors]
        by_header = [key for key in header if key != "__metadata__"]
        assert len({tuple(by_offset), tuple(by_header), tuple(sorted(by_offset))}) == 3
        assert by_offset == sorted(by_header, key=lambda key: cast(int, header[key]["data_offsets"][0]))


def test_split_layer_cuts_a_matrix(tmp_path: Path) -> None:
    made = make_small(tmp_path, split_layer=True)
    place = {tensor.name: name for name, tensors in made.files.items() for tensor in tensors}
    stem = "language_model.model.layers.1.mlp.experts.8.gate_proj."
    assert place[f"{stem}weight_packed"] == "model-00002-of-000007.safetensors"
    assert place[f"{stem}weight_scale"] == "model-00003-of-000007.safetensors"


def test_config_is_where_each_form_has_it(small: Checkpoint, tmp_path: Path) -> None:
    nested = json.loads((small.folder / "config.json").read_text())
    assert "quantization_config" not in nested
    assert nested["text_config"]["quantization_config"]["format"] == "pack-quantized"
    assert nested["text_config"]["n_routed_experts"] == 16
    flat = json.loads(
        (make_small(tmp_path, form="k2-thinking", experts=8).folder / "config.json").read_text()
    )
    assert flat["architectures"] == ["DeepseekV3ForCausalLM"]
    assert flat["quantization_config"]["ignore"][0] == "lm_head"
    assert flat["n_routed_experts"] == 8


# Values tell where they belong.


@pytest.mark.slow
def test_packing_is_that_of_compressed_tensors() -> None:
    torch = pytest.importorskip("torch", reason="compressed-tensors packs torch tensors")
    reason = "the library that the published weights were packed with"
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason=reason)
    codes = expected_codes(1, 2, "up", 64, 256)
    packed = helpers.pack_to_int32(torch.from_numpy(codes.astype(np.int8) - 8), 4)
    np.testing.assert_array_equal(packed.numpy(), expected_packed(1, 2, "up", 64, 256))


def test_files_hold_what_is_expected(small: Checkpoint) -> None:
    for name, value in read_all(small).items():
        np.testing.assert_array_equal(value, expected_tensor(small.tensors[name]))
        if name.endswith("down_proj.weight_shape"):
            assert tuple(value) == (SMALL.hidden, SMALL.moe_intermediate)


def test_no_two_tensors_are_alike(small: Checkpoint) -> None:
    digests = [
        hashlib.sha256(value.tobytes()).digest()
        for name, value in read_all(small).items()
        if not name.endswith("weight_shape")
    ]
    assert len(set(digests)) == len(digests)


def test_no_two_rows_or_columns_of_a_tensor_are_alike(small: Checkpoint) -> None:
    for name, value in read_all(small).items():
        if not name.endswith("weight_shape"):
            for axis in range(value.ndim):
                assert np.unique(value, axis=axis).shape[axis] == value.shape[axis], (name, axis)


def test_codes_are_on_the_grid_of_the_published_weights() -> None:
    codes = expected_codes(1, 0, "down", 256, 512).reshape(256, -1, 32).astype(int) - 8
    assert set(np.unique(codes)) == set(range(-7, 8))
    assert np.all(np.abs(codes).max(axis=2) == 7)
    scales = expected_scales(1, 0, "down", 256, 16)
    assert scales.min() >= 0x3B80
    assert len(np.unique(scales)) > 450


places = st.tuples(st.integers(0, 60), st.integers(0, 383), st.sampled_from(PROJECTIONS))


@given(st.lists(places, min_size=2, max_size=2, unique=True), st.sampled_from([16, 32, 64]))
def test_matrices_of_two_places_differ_everywhere(pair: list[tuple[int, int, str]], rows: int) -> None:
    codes = [expected_codes(*place, rows, 256) for place in pair]
    scales = [expected_scales(*place, rows, 8) for place in pair]
    # Not only as a whole: any part of a rank's size or a row shows the swap.
    assert not np.any(np.all(codes[0] == codes[1], axis=1))
    assert not np.any(np.all(codes[0].reshape(rows, -1, 64) == codes[1].reshape(rows, -1, 64), axis=(0, 2)))
    assert not np.any(np.all(scales[0] == scales[1], axis=1))


@given(places, st.data())
def test_any_swap_inside_a_matrix_shows(place: tuple[int, int, str], data: st.DataObject) -> None:
    codes, scales = expected_codes(*place, 64, 256), expected_scales(*place, 64, 8)
    for matrix in (codes, scales):
        for axis, size in enumerate(matrix.shape):
            one, two = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
            order = np.arange(size)
            order[[one, two]] = two, one
            assert matrix.take(order, axis).tobytes() != matrix.tobytes()


# Full-size layers.


def test_layers_have_the_published_shapes_and_small_company() -> None:
    dims = layers_dims(2, 384, dense=True)
    for made, published in zip(plan_files(dims)[:3], plan_files(FULL)[:3], strict=True):
        assert made == published
    assert sum(tensor.nbytes for file in plan_files(dims)[3:] for tensor in file) < 64e6
    assert layers_dims(2, 8).first_k_dense == 0


def test_random_experts_are_distinct() -> None:
    dims = layers_dims(3, 384)
    packed = [tensor for file in plan_files(dims) for tensor in file if tensor.name.endswith("weight_packed")]
    content = random_content(dims, 1)
    assert len({bytes(next(iter(content(tensor)))[:16]) for tensor in packed}) == 3 * 384 * 3
    pieces = [b"".join(content(tensor)) for tensor in packed[:6]]
    assert [len(piece) for piece in pieces] == [7_340_032] * 6
    packed_bytes = np.frombuffer(pieces[0], np.uint8)
    codes = np.stack([packed_bytes & 15, packed_bytes >> 4], axis=1).reshape(-1, 32).astype(int) - 8
    assert np.all(np.abs(codes).max(axis=1) == 7)
    assert b"".join(random_content(dims, 1)(packed[0])) == pieces[0]
    assert b"".join(random_content(dims, 2)(packed[0])) != pieces[0]


def test_layers_are_a_whole_checkpoint(tmp_path: Path) -> None:
    made = make_layers(tmp_path / "made", experts=1)
    try:
        for name, tensors in made.files.items():
            start, header = read_header(made.folder / name)
            assert set(header) - {"__metadata__"} == {tensor.name for tensor in tensors}
            assert (made.folder / name).stat().st_size == start + sum(tensor.nbytes for tensor in tensors)
        config = json.loads((made.folder / "config.json").read_text())["text_config"]
        assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (1, 0)
        assert (config["hidden_size"], config["n_routed_experts"]) == (7168, 1)
    finally:
        # 300 MB that nobody needs to look at later.
        shutil.rmtree(made.folder)


def test_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    arguments = ["small", str(tmp_path / "made"), "--form", "k2-thinking", "--experts", "4", "--split-layer"]
    result = run(main, arguments)
    assert result.exit_code == 0
    assert "5 files" in result.stdout
    again = run(main, arguments)
    assert again.exit_code == 1
    assert "give a new folder" in again.stderr
