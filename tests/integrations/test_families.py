"""Which families are driven, and that every other one is refused by name and reason."""

from pathlib import Path

import pytest

import hal
from hal.integrations.transformers import DRIVEN, Undriven, open_folder
from hal.integrations.transformers.families import LEFT_ALONE, check_driven
from hal.integrations.transformers.mixers import MIXERS
from support.model_configs import TINY
from support.models import CONFIGS


def test_every_kind_in_the_table_has_a_driven_family() -> None:
    kinds = {
        layer.stateful
        for name in DRIVEN
        for layer in hal.model.read(CONFIGS / f"{name}.json").stateful_layers()
    }
    assert kinds == set(MIXERS)


def test_each_tiny_config_is_of_a_family_that_is_driven_or_left_alone() -> None:
    assert set(TINY) - set(LEFT_ALONE) == DRIVEN


@pytest.mark.parametrize("name", sorted(LEFT_ALONE))
def test_a_family_left_alone_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(Undriven, match=f"does not drive {name}: it"):
        check_driven(name)


def test_a_family_without_seams_is_refused_on_one_line() -> None:
    with pytest.raises(
        Undriven,
        match=r"not drive unheard_of: no seam.*serve it in an engine; this runner drives bailing",
    ) as info:
        check_driven("unheard_of")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", sorted(set(TINY) & set(LEFT_ALONE)))
def test_what_is_not_driven_is_refused_by_name_before_its_weights(
    tmp_path: Path, name: str
) -> None:
    """No weight is in the folder, so whoever looked for them would miss them."""
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    refused = f"does not drive {name}: its|{name} cannot run on cpu: "
    with pytest.raises((Undriven, hal.Unsupported), match=refused):
        open_folder(tmp_path, "cpu")
