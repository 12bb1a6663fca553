"""What is no regular file is refused at once, wherever a model is opened."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllmx_core.errors import ConfigError, ModelNotFoundError, VllmxError, WeightFormatError
from vllmx_core.system.files import open_model_file, open_regular, replacing, warn_of_readers
from vllmx_core.system.json_files import read_json_object
from vllmx_engine.text.model_files import read_bytes, read_chat_templates
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.safetensors import open_checkpoint

READERS: dict[str, tuple[Callable[[Path], object], type[VllmxError]]] = {
    "config.json": (read_json_object, ModelNotFoundError),
    "tokenizer.json": (lambda path: read_bytes(path, 1000), ConfigError),
    "model.gguf": (GGUFFile, ModelNotFoundError),
    "model.safetensors": (lambda path: open_checkpoint(path.parent), ModelNotFoundError),
}


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Raises after five seconds where somebody waits for a writer."""

    def late(*_: object) -> None:
        raise TimeoutError("still waiting for what is not a regular file")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_device])
@pytest.mark.parametrize("name", READERS)
def test_a_model_of_other_than_files(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    if name == "model.safetensors":
        (tmp_path / "config.json").write_text("{}")
    make(tmp_path / name)
    read, error = READERS[name]
    with pytest.raises(error, match=f"{name}.*a (named pipe|device) and not a regular file"):
        read(tmp_path / name)


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("config.json")
        with pytest.raises(ModelNotFoundError, match=r"config\.json cannot be read"):
            read_json_object(Path("config.json"))


def test_files_are_read_through_links_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    (tmp_path / "link").symlink_to("blob")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
        assert not os.get_inheritable(file.fileno())
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4096000\n"
)
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
FILES_OF_MODELS: dict[str, Callable[[Path], object]] = {
    **{name: read for name, (read, _) in READERS.items()},
    "chat_template.jinja": lambda path: read_chat_templates(path.parent, {}),
    "generation_config.json": lambda path: open_checkpoint(path.parent),
    "model.safetensors.index.json": lambda path: open_checkpoint(path.parent),
    "mmproj-F16.gguf": GGUFFile,
}


@pytest.mark.parametrize(
    ("content", "message"),
    [(POINTER, "is a Git LFS pointer, not the file: run `git lfs pull`"), (PAGE, "is a web page")],
    ids=["pointer", "page"],
)
@pytest.mark.parametrize("name", FILES_OF_MODELS)
def test_what_lies_in_the_place_of_a_file_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightFormatError, match=f"{name} {message}"):
        FILES_OF_MODELS[name](tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"v", POINTER[:20], b"<", b"{}"])
def test_short_files_are_what_they_are(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with open_model_file(tmp_path / "file") as file:
        assert file.read() == content


def test_a_new_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_with_its_mode_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError("the disk, say")

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"old"
    with replacing(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    with replacing(path, private=True) as file:
        file.write(b"own")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"own", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    if is_there:
        real.write_bytes(b"old")
    link.symlink_to(real)
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert [each.name for each in real.parent.iterdir()] == ["real"]


def test_a_device_stays() -> None:
    with replacing(Path("/dev/null")) as file:
        file.write(b"gone")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(("mode", "warns"), [(0o600, 0), (0o400, 0), (0o604, 1), (0o660, 1)])
def test_secrets_that_others_may_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: int
) -> None:
    path = tmp_path / "key.pem"
    path.touch()
    path.chmod(mode)
    warn_of_readers(path, "--ssl-keyfile")
    assert len(caplog.records) == warns
    assert all(f"chmod 600 {path}" in record.getMessage() for record in caplog.records)
    warn_of_readers(tmp_path / "none", "--ssl-keyfile")
