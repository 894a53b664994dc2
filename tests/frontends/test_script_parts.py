"""What modules hold, in scripts: weights, buffers and statistics that are shared, written to, or may be None."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore")
BF16, FP32 = torch.bfloat16, torch.float32


class Base(nn.Module):
    """Layers, a buffer, a view of it, and a number of steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.count = 2
        self.linear, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.linear.weight
        self.convolution = nn.Conv1d(1, 64, 3, padding=1)
        self.norm, self.instances = nn.BatchNorm1d(8), nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("table", torch.randn(8, 8))
        self.register_buffer("view", self.table[1:])


class WritesAfterALoop(Base):
    def forward(self, x: Tensor):
        for _ in range(self.count):
            x = self.linear(x * 1.5)
        x.mul_(0.5)
        return x


class WritesToABuffer(Base):
    def forward(self, x: Tensor):
        for _ in range(self.count):
            self.table.mul_(0.5)
            x = self.linear(x * 1.5) + self.table[:4]
        return x


class WritesToAView(Base):
    def forward(self, x: Tensor):
        y = x @ self.table
        for _ in range(self.count):
            self.table[0].mul_(2)
        return y, x @ self.table


class WritesToWhatIsPassedOn(Base):
    def forward(self, x: Tensor):
        y = x @ self.table
        table = self.table
        for _ in range(self.count):
            table.mul_(2)
            table = table * 1.5
        return y, x @ self.table


class WritesToAnotherViewOfABuffer(Base):
    def forward(self, x: Tensor):
        y = x @ self.table
        self.view.mul_(2)
        return y, x @ self.table


class SetsABuffer(Base):
    def forward(self, x: Tensor):
        y = x @ self.table
        self.table = self.table * 2
        return y, x @ self.table


class BiasInALoop(Base):
    def forward(self, x: Tensor):
        for _ in range(self.count):
            x = self.convolution((x * 1.5)[:, None]).mean(1)
        return x


class TiedWeights(Base):
    def forward(self, x: Tensor):
        return self.linear(x), self.tied(x * 1.5)


class UnreadNorms(Base):
    def forward(self, x: Tensor):
        self.norm(x)
        for _ in range(self.count):
            self.instances(x[None]) * 2
        return x * 1.5


PROGRAMS = [
    WritesAfterALoop, WritesToABuffer, WritesToAView, WritesToWhatIsPassedOn, WritesToAnotherViewOfABuffer,
    SetsABuffer, BiasInALoop, TiedWeights, UnreadNorms,
]  # fmt: skip


def run(call, module):
    """The results, the gradients by name, and what buffers are afterwards."""
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    found = call(x)
    results = found if isinstance(found, tuple) else (found,)
    sum((y.double() * torch.randn(y.shape)).sum() for y in results if y.requires_grad).backward()
    gradients = [(name, weight.grad) for name, weight in module.named_parameters() if weight.grad is not None]
    return [("x", x.grad), *gradients, *module.named_buffers(), *((str(n), y) for n, y in enumerate(results))]


def inside(call):
    def called(x):
        with nc.autocast("cpu", BF16):
            return call(x)

    return called


def assert_same(expected, found):
    for (name, a), (other, b) in zip(expected, found, strict=True):
        assert name == other and a.dtype is b.dtype and torch.equal(a, b), name


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", ["script", "convert", "called in a region", "saved"])
def test_what_a_module_holds(kind, form, tmp_path):
    """Results, gradients and buffers are those of eager code, to the bit."""
    model = kind()
    expected = run(inside(model), model)
    if form == "called in a region":
        made = nc.script(kind())
        assert_same(expected, run(inside(made), made))
    elif form == "saved":
        nc.script(kind(), under=BF16).save(str(tmp_path / "low.pt"))
        made = torch.jit.load(tmp_path / "low.pt")
        with torch.jit.optimized_execution(False):
            assert_same(expected, run(made, made))
    else:
        module = kind()
        made = nc.script(module, under=BF16) if form == "script" else nc.script(torch.jit.script(module), under=BF16)
        assert_same(expected, run(made, made))


class Traced(nn.Module):
    """Holds a script with a layer whose bias may be None."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part = torch.jit.script(nn.Conv1d(1, 2, 3, padding=1))

    def forward(self, x):
        return self.part(x[:, None])


def test_what_a_conversion_reads_is_not_in_the_trace_around_it():
    """Sizes of a bias were calls there, of which TorchScript knows none for what may be None."""
    model, x = Traced(), torch.randn(4, 8)
    with nc.autocast("cpu", BF16):
        expected = model(x)
    traced = nc.trace(model, (x,), under="bf16")
    assert torch.equal(traced(x), expected) and "aten::size" not in str(traced.inlined_graph)


def test_a_bias_that_may_be_none_is_not_asked_for():
    """A convolution's graph decides no more, while it runs, than that of a linear layer."""
    convolution, linear = (nc.script(m, under=BF16).graph for m in (nn.Conv1d(1, 2, 3), nn.Linear(8, 8)))
    assert len(convolution.findAllNodes("prim::If")) == len(linear.findAllNodes("prim::If")) == 1


def test_norms_that_something_reads_are_as_they_were():
    """Nothing is added for those that are read; and what is made of a trace counts, too."""
    graphs = [nc.script(m, under=BF16).graph for m in (nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), UnreadNorms())]
    assert ["without dimensions" in str(graph) for graph in graphs] == [False, True]
    model = UnreadNorms()
    made = nc.script(torch.jit.trace(model, (torch.randn(4, 8),), check_trace=False), under=BF16)
    before = made.norm.running_mean.clone()
    made(torch.randn(4, 8))
    assert not torch.equal(made.norm.running_mean, before)


class UnreadPart(nn.Module):
    """Calls a norm in a region, and reads nothing of what it gives."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 2) + 1
        y = x * 3
        return y


class HasUnreadPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = UnreadPart()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_statistics_of_a_norm_in_a_part_that_nothing_reads():
    """Torch inlines the part as it optimizes it, and would have dropped the norm."""
    x, model = torch.randn(4, 8), HasUnreadPart()
    made = nc.script(copy.deepcopy(model), under=BF16)
    for run in (model, made):
        run(x)
    assert torch.equal(made.part.norm.running_mean, model.part.norm.running_mean)
    assert model.part.norm.running_mean.any()
    made = nc.trace(model, (x,), check_trace=False)
    for run in (model, made):
        run(x)
    assert torch.equal(made.part.norm.running_mean, model.part.norm.running_mean)


class Block(nn.Module):
    """A part of a model."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class BlockWithARegion(Block):
    def forward(self, x: Tensor) -> Tensor:
        with nc.autocast("cpu", torch.bfloat16, policy=NAMED):
            return self.inner(x)


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Task(nn.Module):
    """Its own call is never made."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def training_step(self, x):
        return self.part(x)


X = torch.randn(2, 4)
NAMED = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="part.inner"), name="named")
FORMS = {
    "Python": lambda part: part,
    "script": nc.script,
    "trace": lambda part: nc.trace(part, (X,)),
    "converted": lambda part: nc.script(torch.jit.script(part)),
}
RULES = [{"module": name} for name in ("part.inner", "part", "inner", "other.inner")]
RULES += [{"module_class": name} for name in ("Model", "Task", "Block", "ExplicitModule")]
RULES += [{"function": "*Model.forward"}, {"function": "*training_step"}]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_about_places_mean_a_part_as_eager_code_does(rule):
    """By its path from the outermost module that is called, whatever the part is; where no module calls it, its own."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", **rule))

    def formats(part):
        model, task = Model(part), Task(part)
        with nc.autocast("cpu", BF16, policy=policy):
            found = [model(X).dtype, task.training_step(X).dtype, part(X).dtype]
        compiled = nc.compile(model, under=policy, backend="aot_eager")
        return [*found, compiled(X).dtype]

    expected = formats(Block())
    for name, form in FORMS.items():
        assert formats(form(Block())) == expected, name


def test_one_script_in_two_places_follows_the_rules_of_each():
    """Rules about the one say nothing about the other."""
    part = nc.script(Block())
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="part.inner"))
    with nc.autocast("cpu", BF16, policy=policy):
        found = [Model(part)(X).dtype, part(X).dtype, Model(Model(part))(X).dtype, Model(part)(X).dtype]
    assert found == [FP32, BF16, BF16, FP32]


def test_a_region_in_a_part_sees_what_is_around_it():
    """As in eager code: its rules are about the whole model. With a region given, a script is a model of its own."""
    assert Model(BlockWithARegion())(X).dtype is Model(nc.script(BlockWithARegion()))(X).dtype is FP32
    assert nc.script(BlockWithARegion())(X).dtype is BF16
    own = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="inner"))
    part = nc.script(Block(), under=own)
    with nc.autocast("cpu", BF16):
        assert part(X).dtype is Model(part)(X).dtype is FP32


def test_a_function_that_is_a_script_stands_where_it_is_called():
    """In the modules whose methods call it."""
    script = nc.script(_scaled)
    for path, expected in (("part", FP32), ("other", BF16)):
        policy = nc.Policy.native().with_rules(nc.Rule("aten.mm", "full", module=path))
        with nc.autocast("cpu", BF16, policy=policy):
            assert Model(Calls(script))(X).dtype is Model(Calls(_scaled))(X).dtype is expected


def _scaled(x: Tensor) -> Tensor:
    return torch.mm(x, x.t())


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_region_for_a_script_that_is_cast_already_is_warned_about(tmp_path):
    """With what to write; a region on another device type has something left, and so has what was left open."""
    nc.script(Block(), under=BF16).save(str(tmp_path / "low.pt"))
    loaded = torch.jit.load(tmp_path / "low.pt")
    for script in (loaded, nc.script(Block(), under=BF16), nc.trace(_scaled, (X,), under=BF16)):
        with pytest.warns(nc.errors.ScriptWarning, match=r"cast already.*Give the original"):
            nc.script(script, under=nc.autocast("cpu", torch.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.errors.ScriptWarning)
        nc.script(loaded)
        nc.script(loaded, under=nc.autocast("cuda", BF16))
        nc.script(nc.script(Block()), under=BF16)


def test_explanations_name_scripts_that_are_cast_already(tmp_path):
    """Those that were loaded, which a region casts once more; not those that know."""
    nc.script(Block(), under=BF16).save(str(tmp_path / "low.pt"))
    parts = torch.jit.load(tmp_path / "low.pt"), nc.script(Block(), under=BF16)
    notes = [nc.explain(Model(part), (X,)).note for part in parts]
    assert ["nc.script(part) keeps its casts" in note for note in notes] == [True, False]


class Outer(nn.Module):
    """A part that was scripted by itself, and a layer beside it."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(1)
        self.part, self.own = part, nn.Linear(4, 4)

    def forward(self, x: Tensor):
        return self.part(x), self.own(x)


class Half(nn.Module):
    """One layer in a region, one outside of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inside(x)
        return y, self.outside(x)


@pytest.mark.parametrize("form", ["script", "convert", "in a region", "file"])
def test_a_part_keeps_its_regions_policy_and_formats(form, tmp_path):
    """The outer region rules what the part left open, and nothing else."""
    x = torch.randn(2, 4)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"))
    torch.manual_seed(0)
    ruled = nc.script(nn.Linear(4, 4), under=policy)
    for part, formats in ((ruled, (torch.float32,)), (nc.script(Half()), (torch.bfloat16, torch.float16))):
        expected = part(x)
        if form == "convert":
            made = nc.script(torch.jit.script(Outer(part)), under="fp16")
        elif form == "file":
            nc.script(Outer(part)).save(str(tmp_path / "outer.pt"))
            made = nc.script(torch.jit.load(str(tmp_path / "outer.pt")), under="fp16")
        else:
            made = nc.script(Outer(part), **({} if form == "in a region" else {"under": "fp16"}))
        with nc.autocast("cpu", torch.float16, enabled=form == "in a region"):
            found, own = made(x)
        found, expected = (v if isinstance(v, tuple) else (v,) for v in (found, expected))
        assert tuple(t.dtype for t in found) == formats and own.dtype is torch.float16
        assert torch.equal(found[0], expected[0])


def test_a_saved_file_loads_where_a_method_computes_nothing(tmp_path):
    """A file cannot hold a with statement without a body: `__len__` of an nn.Sequential."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    for made in (nc.script(torch.jit.script(model), under="bf16"), nc.script(model, under="bf16")):
        made.save(str(tmp_path / "low.pt"))
        loaded = torch.jit.load(str(tmp_path / "low.pt"))
        assert loaded(torch.randn(2, 4)).dtype is BF16


def left_early(x: torch.Tensor, n: int):
    with torch.autocast("cpu"):
        if n > 1:
            return torch.mm(x, x)
        x = torch.mm(x + 1, x)
    return x.float()


def unused(x: torch.Tensor, n: int):
    left_early(x, n)
    return x * 2


def test_a_saved_file_loads_where_nothing_reads_what_is_left_early(tmp_path):
    """Nothing is left of the branches, and a file cannot hold an if without a body either."""
    nc.script(unused).save(str(tmp_path / "unused.pt"))
    assert torch.jit.load(str(tmp_path / "unused.pt"))(torch.ones(2, 2), 1).tolist() == [[2.0, 2.0], [2.0, 2.0]]


class Recurrent(torch.nn.Module):
    """A recurrent layer, whose `forward` TorchScript compiles as overloads, and what follows it."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = torch.nn.LSTM(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y, _ = self.layer(x)
        return self.out(y)


class WithGRU(Recurrent):
    """Another one."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(8, 8)


class WithRNN(Recurrent):
    """A third."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.RNN(8, 8)


@pytest.mark.parametrize(
    "make", [nc.script, lambda model, under: nc.trace(model, (torch.randn(3, 2, 8),), under=under)]
)
def test_a_rule_about_a_part_of_a_call_inside_a_recurrent_layer_is_not_dropped_in_silence(make):
    """A simple one is one op in a script, which calls linear for each step; of a GRU the calls stand in the script."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "to(fp32)", argument="result"))
    for model, warned in ((WithRNN(), True), (WithGRU(), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(model, under=policy)
        assert any("result: to(fp32) does not hold in it" in str(w.message) for w in caught) is warned


@pytest.mark.parametrize("kind", [Recurrent, WithGRU, WithRNN])
@pytest.mark.parametrize("asked", ["pin", "pin with results", "full", "lower", "inside"])
def test_recurrent_layers_keep_their_pins_and_rules_in_scripts(kind, asked):
    """Their `forward` has overloads, with names of their own."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 2, 8)
    policy = nc.Policy.native()
    if asked.startswith("pin"):
        nc.pin(model.layer, "fp32", **({"out": "input"} if "results" in asked else {}))
    else:
        policy = policy.with_rules(nc.Rule("module.call", asked, module="layer"))
    with torch.no_grad(), nc.autocast("cpu", torch.bfloat16, policy=policy):
        expected = model(x)
    scripted = nc.script(model, under=policy)
    with torch.no_grad():
        found = scripted(x)
    assert found.dtype is expected.dtype and torch.equal(found, expected)


class Tied(nn.Module):
    """A product, and its weight read by another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) @ self.weight


def test_rules_about_all_arguments_of_a_call_make_its_result():
    """A call whose tensors are all kept in fp32 gives fp32, whatever its own rule says; what reads that is cast."""
    rules = [nc.Rule("aten.linear", "to(fp32)", argument=argument) for argument in ("weight", "bias", "input")]
    policy, model, x = nc.Policy.native().with_rules(rules), Tied(), torch.randn(4, 8)
    with nc.autocast("cpu", policy=policy):
        expected = model(x)
    assert torch.equal(nc.script(model, under=policy)(x), expected)


LAYERS = {"lstm": Recurrent, "gru": WithGRU, "rnn_tanh": WithRNN}


RECURRENT_RULES = [(name, rule) for name in LAYERS for rule in ("full", "lower", "to(fp16)", "in a function")]
RECURRENT_RULES += [("gru", "linear in a function"), ("rnn_tanh", "linear in a function")]


@pytest.mark.parametrize(("name", "rule"), RECURRENT_RULES)
def test_rules_about_recurrent_ops_themselves_hold_in_scripts_and_traces(name, rule):
    """Not only those about the op that each calls; in a trace those about functions, too."""
    op, where = ("linear" if rule.startswith("linear") else name), {}
    action = "full" if rule.endswith("function") else rule
    if rule.endswith("function"):
        where = {"function": "*Recurrent.forward*"}
    policy = nc.Policy.native().with_rules(nc.Rule(f"aten.{op}", action, **where))
    model, x = LAYERS[name](), torch.randn(3, 2, 8)
    with torch.no_grad(), nc.autocast("cpu", torch.bfloat16, policy=policy):
        expected = model(x)
    made = [nc.trace(model, (x,), under=policy)] + [nc.script(model, under=policy)] * (not where)
    for each in made:
        with torch.no_grad():
            found = each(x)
        pairs = list(zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True))
        assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("op", ["sum", "mean", "sort", "var_mean", "topk", "tensordot"])
def test_rules_about_results_hold_in_traces_whatever_the_op_calls(op):
    """A trace has one call of an op that calls another of its overloads, whose cast it does not have."""

    class Reduced(nn.Module):
        def forward(self, x):
            y = x @ x.t()
            given = (y, y.t(), 1) if op == "tensordot" else (y, 2) if op == "topk" else (y,)
            found = getattr(torch, op)(*given)
            return found[0] if isinstance(found, tuple) else found

    policy, x = nc.Policy.native().with_rules(nc.Rule(f"aten.{op}", "to(fp32)", argument="result")), torch.randn(4, 4)
    with nc.autocast("cpu", policy=policy):
        expected = Reduced()(x)
    found = nc.trace(Reduced(), (x,), under=policy, check_trace=False)(x)
    assert found.dtype is expected.dtype is FP32 and torch.equal(found, expected)


def test_a_rule_about_the_result_of_what_a_script_opens_is_not_dropped_in_silence():
    """A script has the calls inside of it."""

    def product(a, b):
        return torch.tensordot(a, b, 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nc.script(product, under=nc.Policy.native().with_rules(nc.Rule("aten.tensordot", "full", argument="result")))
    assert sum("aten.tensordot" in str(w.message) and "does not hold in it" in str(w.message) for w in caught) == 1


def test_actions_that_compare_formats_of_lists_are_refused():
    """TorchScript's own text was that a bug be reported to PyTorch."""
    with pytest.raises(RefusedError, match="compares formats of lists"):
        nc.script(Recurrent(), under=nc.Policy.native().with_rules(nc.Rule("aten.lstm", "inside")))


def test_warnings_name_the_line_of_the_user_s_that_asked():
    """Not one of the library, whichever function gives them."""
    model, x = nn.Bilinear(5, 6, 4), (torch.randn(3, 5), torch.randn(3, 6))
    scripted = torch.jit.script(nn.Linear(4, 4))
    named = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", function="nope"))

    def uses_data(x):
        return (x @ x).data * 2

    asked = [
        lambda: nc.script(model, under="bf16"),
        lambda: nc.trace(model, x, under="bf16", check_trace=False),
        lambda: nc.script(scripted, under=named),
        lambda: nc.script(nc.script(nn.Linear(4, 4), under="bf16"), under="bf16"),
        lambda: nc.compile(uses_data, under="bf16", backend="aot_eager")(torch.randn(3, 3)),
    ]
    for ask in asked:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask()
        told = [w for w in caught if str(w.message).startswith("narrowcast: ")]
        assert told and all(w.filename == __file__ for w in told), [(w.filename, str(w.message)) for w in told]


def test_a_trace_warns_of_ops_inside_which_eager_code_casts():
    """As a script does."""
    model, x = nn.Bilinear(5, 6, 4), (torch.randn(3, 5), torch.randn(3, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nc.trace(model, x, under="bf16", check_trace=False)
        nc.trace(model, x, under=nc.Policy.native().with_rules(nc.Rule("aten.bilinear", "lower")), check_trace=False)
    assert sum("aten.bilinear" in str(w.message) and "casts in this region" in str(w.message) for w in caught) == 1
