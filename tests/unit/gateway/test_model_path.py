"""Where a model's files are found, and how it is called."""

from pathlib import Path

import pytest

from shared import model_path
from shared.errors import ModelError


def test_no_name_is_the_default_model():
    """It comes as a package, which is located but not imported."""
    path = model_path.resolve("")
    assert path.suffix == ".gguf"
    assert model_path.model_name(path) == "SmolLM2-135M-Instruct"


def test_files_and_folders_are_taken_as_they_are(tmp_path: Path):
    """A .gguf file, a folder with config.json, or a folder with one .gguf file."""
    file = tmp_path / "My-Model.Q4_K_M.gguf"
    file.touch()
    assert model_path.resolve(str(file)) == file
    assert model_path.resolve(str(tmp_path)) == file
    (tmp_path / "config.json").touch()
    assert model_path.resolve(str(tmp_path)) == tmp_path
    assert model_path.model_name(file) == "My-Model"
    assert model_path.model_name(tmp_path) == tmp_path.name


@pytest.mark.parametrize("name", ["missing.gguf", "/no/such/folder", "./x", "a/b/c", "not a model"])
def test_what_is_not_there_is_named(name: str):
    """The message says what was looked for."""
    with pytest.raises(ModelError, match="no such file"):
        model_path.resolve(name)


def test_other_files_and_empty_folders_are_refused(tmp_path: Path):
    """Neither holds a model."""
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelError, match="neither"):
        model_path.resolve(str(tmp_path / "x.bin"))
    with pytest.raises(ModelError, match="found none"):
        model_path.resolve(str(tmp_path))


def test_without_the_default_package_the_message_says_so(monkeypatch: pytest.MonkeyPatch):
    """A slim image has no model of its own."""
    monkeypatch.setattr(model_path, "DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="no_such_package_here"):
        model_path.resolve("")


def test_a_hub_id_needs_the_hubs_client(monkeypatch: pytest.MonkeyPatch):
    """And its failures are a ModelError that names the id."""

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(model_path.importlib, "import_module", missing)
    with pytest.raises(ModelError, match="install huggingface_hub"):
        model_path.resolve("owner/name")

    class Hub:
        @staticmethod
        def snapshot_download(*args: object, **options: object) -> str:
            raise OSError("no network")

    monkeypatch.setattr(model_path.importlib, "import_module", lambda name: Hub)
    with pytest.raises(ModelError, match=r"owner/name.*no network"):
        model_path.resolve("owner/name")
