"""What is decided about the calls of modules, without a module."""

import pytest

from narrowcast import Policy, Rule
from narrowcast.core.decide import Region
from narrowcast.core.module_calls import Inside, ModuleCall
from narrowcast.core.policy import MODULE_CALL_OP, Site
from narrowcast.core.refusals import refusal
from narrowcast.errors import Origin
from narrowcast.formats import bf16, fp16, fp32, fp64

HERE = Site("encoder.pool", ("models.Pool",))


def call(*rules):
    """Of models.Pool, in a bf16 region."""
    return ModuleCall(Policy("p", (rules,), extends=()), Region("cpu", bf16), HERE)


@pytest.mark.parametrize(
    ("action", "inside", "cast"),
    [("full", Inside(False, None), (fp32, False)), ("to(fp32)", Inside(False, None), (fp32, True)),
     ("inside", Inside(False, None), (fp32, False)), ("follow", Inside(False, None), (None, False)),
     ("lower", Inside(False, bf16), (bf16, False)), ("to(fp16)", Inside(False, fp16), (fp16, True)),
     ("to(fp64)", Inside(False, None), (fp64, True))],
)  # fmt: skip
def test_an_action_says_what_goes_in_and_what_holds_inside(action, inside, cast):
    """As docs/control.md has it."""
    made = call(Rule("module.call", action, module_class="Pool"))
    assert made.inside(made.plan()) == inside and made.cast_of("x") == cast


def test_without_a_rule_nothing_changes():
    """A rule about another class is none."""
    made = call(Rule("module.call", "full", module_class="Other"))
    assert made.inside(made.plan()) == Inside(True, None) and made.cast_of("x") == (None, False)
    assert made.rule_about("x") is None


def test_an_argument_may_have_a_rule_of_its_own():
    """It is stronger than the one about the whole, and says nothing of the regions inside."""
    whole, rois = (
        Rule("module.call", a, module_class="Pool", argument=n) for a, n in (("full", None), ("follow", "rois"))
    )
    made = call(whole, rois)
    assert made.cast_of("rois") == (None, False) and made.cast_of("x") == (fp32, False)
    assert made.names("rois") and not made.names("x")
    assert made.rule_about("rois") is rois and made.rule_about("x") is whole
    alone = call(rois)
    assert alone.inside(alone.plan()) == Inside(True, None)


def test_the_name_result_means_what_is_returned():
    """An argument that is named so has no rule of its own."""
    made = call(Rule("module.call", "to(fp16)", module_class="Pool", argument="result"))
    assert made.cast_of("result") == (None, False) and made.inside(made.plan()).goes_on
    (result,) = made.plan().results
    assert result.format is fp16
    kept = Rule("module.call", "follow", module_class="Pool", argument="result")
    assert call(Rule("module.call", "full", module_class="Pool"), kept).cast_of("result") == (fp32, False)


def test_a_refusal_says_what_was_called_and_where():
    """A module by its own class, an op by its id; in which module, as far as that is known."""
    made = call(Rule("module.call", "refuse", module_class="Pool", reason="it overflows"))
    for site, asked, note in (
        (Site("encoder.pool", ("models.Pool", "models.Encoder"), file="m.py", line=3), "models.Pool", "encoder.pool"),
        (Site("", file="m.py", line=3), "a module", ""),
    ):
        error = refusal(made.plan(), MODULE_CALL_OP, site)
        assert (error.asked, error.found) == (f"the call of {asked}", "it overflows")
        assert error.where == (Origin("m.py", 3, f"in module {note}" if note else ""),)
    assert refusal(made.plan(), "aten.mm.default", Site("")).asked == "aten.mm.default under autocast"
