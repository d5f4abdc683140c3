import pytest

from {{cookiecutter.project_slug}}.harness import space

GOOD = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
    "model.params.width": {"low": 8, "high": 32, "step": 8},
    "regularization.dropout": {"low": 0.0, "high": 0.5, "step": 0.1},
    "batch_size": {"choices": [32, 64, None]},
}


def test_ranges_and_choices_are_accepted():
    space.validate_space(GOOD)
    space.validate_space({"lr": {"low": 0.1, "high": 1.0, "log": False, "step": None}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"low": 1, "hihg": 2}, "hihg is no field here. Nearest: high"),
        ({"low": 1.0, "high": 1.0}, "low 1 must be below high 1"),
        ({"low": 2.0, "high": 1.0}, "low 2 must be below high 1"),
        ({"low": 0.0, "high": 1.0, "log": True}, "must be above 0"),
        ({"low": 1, "high": 9, "log": True, "step": 2}, "log and step do not go together"),
        ({"low": 8, "high": 30, "step": 8}, "never meet high 30; 24 would do"),
        ({"low": 8, "high": 32, "step": 0.5}, "whole numbers, step 0.5 is not"),
        ({"low": 8, "high": 32, "step": 0}, "must be above 0"),
        ({"low": "1e-4", "high": 1.0}, "low='1e-4' is no number"),
        ({"low": float("nan"), "high": 1.0}, "low=nan is no number"),
        ({"low": 1, "high": 2, "log": "yes"}, "write true or false"),
        ({"low": 1}, "has no high"),
        ({"choices": []}, "name two or more"),
        ({"choices": [8]}, "name two or more"),
        ({"choices": [8, [9]]}, "one plain value"),
        ({"choices": [8, 9, 8]}, "names 8 twice"),
        ({"choices": [8, 9], "low": 1}, "low is no field here"),
        (3, "is 3: give it low and high"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_with_its_key(spec, message):
    with pytest.raises(ValueError, match=r"^stage\.space\.a\.b") as refusal:
        space.validate_space({"good": {"choices": [1, 2]}, "a.b": spec})
    assert message in str(refusal.value)


def test_an_empty_space_is_refused():
    with pytest.raises(ValueError, match="name at least one key"):
        space.validate_space({})


def test_whole_bounds_stay_whole_and_fractions_stay_fractions():
    kinds = space.distributions(GOOD)
    assert list(kinds) == sorted(GOOD)
    assert type(kinds["model.params.width"]).__name__ == "IntDistribution"
    assert type(kinds["regularization.dropout"]).__name__ == "FloatDistribution"
    assert kinds["optimizer.lr"].log
    assert kinds["batch_size"].choices == (32, 64, None)
