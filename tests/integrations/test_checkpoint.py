"""A folder's weights are proved whole before anything is loaded; pickles never are."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hal.errors import WeightsError
from hal.integrations.transformers.checkpoint import PICKLES, inspect_folder
from hal.weights import INDEX, SINGLE, WeightBytes, weight_bytes

TENSORS = {"a.weight": torch.ones(3, 5), "b.bias": torch.zeros(7, dtype=torch.bfloat16)}


def single(folder: Path) -> Path:
    save_file(TENSORS, folder / SINGLE, metadata={"format": "pt"})
    return folder / SINGLE


def sharded(folder: Path) -> list[Path]:
    files = []
    for number, (name, tensor) in enumerate(TENSORS.items()):
        files.append(folder / f"model-{number}.safetensors")
        save_file({name: tensor}, files[-1])
    weight_map = {name: file.name for name, file in zip(TENSORS, files, strict=True)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_one_whole_file_is_accepted(tmp_path: Path) -> None:
    file = single(tmp_path)
    found = inspect_folder(tmp_path)
    assert found.files == (file,)
    assert found.bytes == file.stat().st_size


def test_all_shards_are_accepted_and_each_is_looked_at(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    assert inspect_folder(tmp_path).files == tuple(files)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model-1\.safetensors is corrupt"):
        inspect_folder(tmp_path)


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    save_file({}, tmp_path / SINGLE)
    assert inspect_folder(tmp_path).files == (tmp_path / SINGLE,)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_on_one_line_with_a_fix(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    file = single(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(WeightsError, match="download it again") as info:
        inspect_folder(folder)
    assert "\n" not in str(info.value)


def test_a_file_that_is_too_long_is_refused_with_both_sizes(tmp_path: Path) -> None:
    file = single(tmp_path)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(WeightsError, match=rf"needs {size} bytes, the file has {size + 1}"):
        inspect_folder(tmp_path)


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 7,
        b"\x00" * 8,
        b"\xff" * 40,
        header(b"not json"),
        header(b"[1]"),
        header(b"\xff\xfe"),
        header(b'{"a": 1}'),
        header(b'{"a": {"data_offsets": []}}'),
        header(b'{"a": {"data_offsets": [0, "x"]}}'),
        *(
            header(b'{"a": {"data_offsets": [%s]}}' % offsets)
            for offsets in (
                b"400000000000, 0",
                b"1, 0",
                b"-1, 0",
                b"false, true",
                b"0, 1e308",
                b"0, 0.0",
                b"0, null",
                b"0",
                b"0, 0, 0",
                b"0, 1" + b"0" * 400,
                b"0, 1" + b"0" * 5000,
                b"0, 400000000000",
                b"[" * 100_000,
            )
        ),
        header(b"[" * 100_000),
        header(b'{"a": ' * 100_000),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    for read in (inspect_folder, weight_bytes):
        with pytest.raises(WeightsError, match=r"corrupt|not a safetensors file") as caught:
            read(tmp_path)
        assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)[0].unlink()
    with pytest.raises(WeightsError, match=r"lacks 1 of 2 shards \(model-0\.safetensors\)"):
        inspect_folder(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "no json",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": {}}}',
        '{"weight_map": {"a": "."}}',
        '{"weight_map": {"a": "sub/x.safetensors"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": null}}',
        "[" * 100_000,
        '{"weight_map":' * 100_000,
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    for read in (inspect_folder, weight_bytes):
        with pytest.raises(WeightsError, match="download"):
            read(tmp_path)


def test_the_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """As transformers loads them; the plan counts what is loaded."""
    sharded(tmp_path)
    file = single(tmp_path)
    save_file({"a.weight": torch.ones(2)}, file)
    assert inspect_folder(tmp_path).files == (file,)
    assert weight_bytes(tmp_path) == WeightBytes(8)


def test_the_plan_counts_what_is_loaded(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    assert weight_bytes(tmp_path) == WeightBytes(3 * 5 * 4 + 7 * 2)
    (tmp_path / INDEX).unlink()
    assert weight_bytes(tmp_path) is None


@settings(max_examples=200)
@given(first=st.integers(-3, 40), last=st.integers(-3, 40), size=st.integers(0, 40))
def test_offsets_lie_within_the_file(
    tmp_path_factory: pytest.TempPathFactory, first: int, last: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("offsets")
    content = header(b'{"a": {"data_offsets": [%d, %d]}}' % (first, last)) + bytes(size)
    (folder / SINGLE).write_bytes(content)
    if 0 <= first <= last == size:
        assert inspect_folder(folder).bytes == len(content)
        assert weight_bytes(folder) == WeightBytes(last - first)
    else:
        for read in (inspect_folder, weight_bytes):
            with pytest.raises(WeightsError, match="download it again"):
                read(folder)


@pytest.mark.parametrize("pattern", PICKLES)
def test_pickled_weights_alone_are_refused_with_the_way_out(tmp_path: Path, pattern: str) -> None:
    name = pattern.replace("*", "pytorch_model")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(WeightsError, match=rf"pickled weights only \({name}\).*convert them"):
        inspect_folder(tmp_path)


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    file = single(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert inspect_folder(tmp_path).files == (file,)


def test_a_folder_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no weights: expected model\.safetensors or"):
        inspect_folder(tmp_path)
