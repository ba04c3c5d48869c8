"""Which bytes of a file memory shows: by the process's map, and only while nobody has written to the pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepoffload.errors import IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.io.extents import ExtentPart, SourceExtent
from deepoffload.io.mapped_origin import MappedOrigins
from deepoffload.io.part_reads import page_runs
from deepoffload.io.source_files import SourceFiles
from deepoffload.native.aio import HostMapping


@pytest.fixture
def sources() -> Iterator[SourceFiles]:
    with IoEngine(backend="pool") as engine:
        files = SourceFiles(engine)
        yield files
        files.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    values = torch.arange(9000, dtype=torch.float32)
    save_file({"a": values, "b": values[:100] + 1}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def tensor_of(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        found: torch.Tensor = file.get_slice(name)[...]
    return found


@pytest.mark.parametrize("looks", [True, False])
def test_tensors_of_a_checkpoint_are_found_until_they_are_written_to(
    checkpoint: Path, sources: SourceFiles, looks: bool
) -> None:
    origins = MappedOrigins(sources) if looks else MappedOrigins(sources, lambda address, nbytes: None)
    for name in ("a", "b"):
        tensor = tensor_of(checkpoint, name)
        found = origins.find(tensor.data_ptr(), tensor.nbytes)
        assert found is not None
        assert sources.read_at(found.number, found.offset, found.nbytes) == tensor.numpy().tobytes()
    tensor = tensor_of(checkpoint, "a")
    tensor[8000] = 5.0
    assert origins.find(tensor.data_ptr(), tensor.nbytes) is None
    assert origins.find(tensor[:4000].data_ptr(), 16_000) is not None, "these pages are still the file's"
    assert sources.read_at(0, found.offset, 4) != b"", "the file has not been changed"


def test_other_memory_and_other_files_are_no_origins(tmp_path: Path, checkpoint: Path, sources: SourceFiles) -> None:
    origins = MappedOrigins(sources)
    ordinary = torch.zeros(5000)
    assert origins.find(ordinary.data_ptr(), ordinary.nbytes) is None
    (tmp_path / "data.bin").write_bytes(bytes(20_000))
    mapped = torch.from_file(str(tmp_path / "data.bin"), shared=False, size=5000)
    assert origins.find(mapped.data_ptr(), mapped.nbytes) is None, "no safetensors file"
    with open(checkpoint, "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        view = torch.frombuffer(shared, dtype=torch.uint8)
        assert origins.find(view.data_ptr(), 4096) is None, "others can write to a shared mapping"
        del view
    tensor = tensor_of(checkpoint, "a")
    checkpoint.unlink()
    assert origins.find(tensor.data_ptr(), tensor.nbytes) is None


def test_a_file_that_was_written_to_is_told(checkpoint: Path, sources: SourceFiles) -> None:
    status = checkpoint.stat()
    number = sources.number_of(str(checkpoint), status.st_dev, status.st_ino)
    assert number == 0 and sources.number_of(str(checkpoint), status.st_dev, status.st_ino + 1) is None
    extent = SourceExtent(4096, (ExtentPart(0, 0, 4096),), ("a", "b"))
    memory = HostMapping(4096)
    sources.check_all()
    sources.read(extent, memory.address, 4096, urgent=False).wait()
    with open(checkpoint, "ab") as file:
        file.write(b"x")
    with pytest.raises(IoFailure, match="written to after the model was loaded"):
        sources.check_all()
    ticket = sources.read(extent, memory.address, 4096, urgent=False)
    for _ in range(2):
        with pytest.raises(IoFailure, match="a, b: .*written to after the model was loaded"):
            ticket.wait()
    memory.close()


def test_runs_of_pages() -> None:
    assert page_runs([(5000, 10), (0, 1), (4096, 4096), (20_000, 500)]) == [(0, 8192), (16_384, 24_576)]
