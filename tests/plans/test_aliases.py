"""What MODEL may be, and the plan beside a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsekv.plans import aliases
from sparsekv.plans.aliases import ALIASES, SHIPPED, resolve_model
from sparsekv.plans.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "mine"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return model


@pytest.mark.parametrize("alias", [name for name in ALIASES if name != SHIPPED])
def test_an_alias_names_one_checkpoint(alias: str) -> None:
    assert resolve_model(alias).path_or_id == ALIASES[alias]
    assert aliases._HUB_ID.fullmatch(ALIASES[alias])


def test_the_shipped_model_is_found_or_its_absence_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(aliases, "files", lambda _: tmp_path)
    with pytest.raises(UsageError, match="tiny-retriever"):
        resolve_model(SHIPPED)
    shipped = tmp_path / "data" / SHIPPED
    shipped.mkdir(parents=True)
    (shipped / "config.json").write_text("{}")
    assert resolve_model(SHIPPED).path_or_id == str(shipped)


def test_a_folder_is_found_by_path_and_by_bare_name(folder: Path) -> None:
    for name in (str(folder), "./mine", "mine", "mine/"):
        assert Path(resolve_model(name).path_or_id).resolve() == folder.resolve()


def test_a_folder_goes_before_a_hub_id_of_the_same_name(folder: Path) -> None:
    (folder / "config.json").rename(folder / "x")
    (folder / "sub").mkdir()
    (folder / "sub" / "config.json").write_text("{}")
    assert Path(resolve_model("mine/sub").path_or_id) == Path("mine/sub")
    with pytest.raises(UsageError, match="found none"):  # at once, and not by the hub
        resolve_model("mine/other")


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "a\udcffb"], ids=ascii)
def test_a_model_whose_name_cannot_stand_in_a_plan_is_refused(folder: Path, name: str) -> None:
    folder.rename(name)
    Path("link").symlink_to(name)
    Path(f"{name}.gguf").touch()
    for given in (name, "link", f"{name}.gguf"):
        with pytest.raises(UsageError, match="control characters"):
            resolve_model(given)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "org/model.v1_x-2"])
def test_hub_ids_pass_through(name: str) -> None:
    assert resolve_model(name).path_or_id == name
