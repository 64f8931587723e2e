"""Settings: what is accepted, what is refused, and that nothing is lost on the way to a worker."""

import pytest

from nwor.config import NworConfig
from nwor.errors import ConfigError
from nwor.modes import Mode


def test_absent_settings_mean_not_asked_for():
    assert NworConfig.from_additional_config(None) is None
    assert NworConfig.from_additional_config({}) is None
    assert NworConfig.from_additional_config({"other": 1}) is None


def test_defaults_are_stage_with_all_modes():
    config = NworConfig.from_additional_config({"nwor": {}})
    assert config is not None
    assert config.mode is Mode.STAGE
    assert set(config.modes) == set(Mode)


@pytest.mark.parametrize("mode", list(Mode))
def test_round_trip_through_plain_json(mode):
    config = NworConfig.from_mapping(
        {
            "mode": mode.value,
            "self_check_interval": 7,
            "modes": ["off", mode.value],
            "fast_host": False,
            "fast_sampling": False,
            "attention_backends": ["flash", "triton"],
            "draft_tokens": "auto:0-4",
            "fit_windows": True,
            "tree": {"nodes": 4, "depth": 2},
            "tree_acceptance_rates": [0.9, 1e-1],
        }
    )
    assert config.tree_acceptance_rates == ((0.9, 0.1),)
    assert NworConfig.from_mapping(config.to_mapping()) == config


def test_rates_of_each_size_of_trees() -> None:
    rates = [[0.9, 0.1], [0.9, 0.2]]
    config = NworConfig.from_mapping(
        {"tree": {"nodes": 20, "depth": 2, "width": 8}, "tree_acceptance_rates": rates}
    )
    assert config.tree_acceptance_rates == ((0.9, 0.1), (0.9, 0.2))
    assert NworConfig.from_mapping(config.to_mapping()) == config


def test_rates_of_each_depth_of_trees() -> None:
    tree = {"nodes": 16, "depth": 6}
    rates = [[0.9] * depth for depth in (4, 5, 6)]
    config = NworConfig.from_mapping({"tree": tree, "tree_acceptance_rates": rates})
    assert [len(one) for one in config.tree_acceptance_rates] == [4, 5, 6]
    assert NworConfig.from_mapping(config.to_mapping()) == config
    for wrong in (rates[::-1], rates[:2]):
        with pytest.raises(ConfigError, match=r"each level|\(14, 15, 16\) nodes"):
            NworConfig.from_mapping({"tree": tree, "tree_acceptance_rates": wrong})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mode": "fast"}, "off, stage, cow"),
        ({"mod": "off"}, "mod"),
        ({"mode": "stage", "modes": ["off"]}, "not among"),
        ({"modes": "off"}, "list"),
        ({"modes": []}, "at least one"),
        ({"self_check_interval": -1}, "0 or more"),
        ({"self_check_interval": True}, "whole number"),
        ({"self_check_interval": 1.5}, "whole number"),
        ({"fast_host": 1}, "true or false"),
        ({"fit_windows": "on"}, "true or false"),
        ({"fit_windows": True}, "draft_tokens"),
        ({"fast_host": "false"}, "true or false"),
        ({"fast_sampling": None}, "true or false"),
        ({"tree_acceptance_rates": [0.5]}, "each level of the tree"),
        ({"tree_acceptance_rates": [0.1, 0.5], "tree": {"nodes": 4, "depth": 2}}, "each level"),
        ({"tree_acceptance_rates": [1.5], "tree": {"nodes": 4, "depth": 1}}, "0 to 1"),
        ({"tree_acceptance_rates": "half"}, "list of falling numbers"),
        (
            {"tree_acceptance_rates": [[0.5, 0.1], [0.5, 0.1]], "tree": {"nodes": 4, "depth": 2}},
            r"\(4,\) nodes",
        ),
        ({"tree_acceptance_rates": [[0.5], 0.1], "tree": {"nodes": 4, "depth": 1}}, "falling numbers"),
        ({"attention_backends": "triton"}, "list of auto, flash, triton, flashinfer, rocm"),
        ({"attention_backends": []}, "at least one of auto, flash"),
        ({"attention_backends": ["flash", "flex"]}, "flashinfer, rocm, not 'flex'"),
    ],
)
def test_wrong_settings_name_what_is_wanted(settings, word):
    with pytest.raises(ConfigError, match=word):
        NworConfig.from_mapping(settings)


def test_settings_must_be_an_object():
    with pytest.raises(ConfigError, match="object"):
        NworConfig.from_additional_config({"nwor": "stage"})
