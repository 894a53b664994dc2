"""The eager region: a drop-in, with policies."""

import inspect
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import narrowcast as nc
from narrowcast.errors import RefusedError, RegionError, UnknownOpError

x = torch.randn(4, 8)
lin = torch.nn.Linear(8, 8)
THREE = nc.Policy.native().with_rules(
    nc.Rule("aten.gelu", "full"), nc.Rule("aten.softmax.int", "lower"), nc.Rule("aten.layer_norm", "lower")
)


def dtypes():
    y = lin(x)
    return [y.dtype, F.gelu(y).dtype, torch.softmax(x, -1).dtype, F.layer_norm(x, (8,)).dtype]


BF, FP = torch.bfloat16, torch.float32
NATIVE, OURS = [BF, BF, FP, FP], [BF, FP, BF, BF]


def test_the_signature_is_torch_autocast_s_with_a_policy():
    """Same names, order and defaults; what is ours only by keyword, and with a default."""
    ours = list(inspect.signature(nc.autocast.__init__).parameters.values())
    theirs = list(inspect.signature(torch.autocast.__init__).parameters.values())
    same, own = ours[: len(theirs)], ours[len(theirs) :]
    assert [(p.name, p.default, p.kind) for p in same] == [(p.name, p.default, p.kind) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in own] == [
        (name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("policy", "cache_limit_bytes", "inner")
    ]


def test_native_is_native():
    """Dtypes, state inside, state after."""
    with nc.autocast("cpu", torch.float16, cache_enabled=False):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_cache_enabled()
        assert lin(x).dtype is torch.float16
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    with nc.autocast("cpu"):
        assert dtypes() == NATIVE
    with nc.autocast("cpu", enabled=False):
        assert lin(x).dtype is FP


def test_a_policy_changes_its_ops_and_no_others():
    """Inside; and nothing outside, in native regions, or in other threads."""
    with nc.autocast("cpu", policy=THREE):
        assert dtypes() == OURS
    assert dtypes() == [FP] * 4
    with torch.autocast("cpu"):
        assert dtypes() == NATIVE


def test_nested_regions_of_different_policies():
    """The innermost rules, and the outer one comes back."""
    other = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "to(fp16)"))
    with nc.autocast("cpu", policy=THREE):
        with nc.autocast("cpu", policy=other):
            assert F.gelu(x).dtype is torch.float16
            assert torch.softmax(x, -1).dtype is FP
        assert dtypes() == OURS
        with nc.autocast("cpu"):
            assert dtypes() == NATIVE
        with nc.autocast("cpu", enabled=False, policy=other):
            assert F.gelu(x).dtype is FP
        assert dtypes() == OURS


def test_a_torch_autocast_region_inside_ours_is_left_to_torch():
    """Other libraries' regions are untouched, also with the same dtype."""
    with nc.autocast("cpu", policy=THREE):
        with torch.autocast("cpu"):
            assert dtypes() == NATIVE
            with nc.autocast("cpu", policy=THREE):
                assert dtypes() == OURS
            assert dtypes() == NATIVE
        assert dtypes() == OURS


def test_regions_of_two_device_types_keep_apart():
    """Ours for cpu holds inside ours for another device type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nc.autocast("cpu", policy=THREE), nc.autocast("xpu", policy=THREE):
            assert dtypes() == OURS


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_names_its_type(device):
    """As torch.autocast takes `cuda:0`; in code that Dynamo traces, too."""

    @torch.compile(backend="eager")
    def traced():
        with nc.autocast(device, policy=THREE):
            return F.gelu(lin(x))

    with nc.autocast(device, policy=THREE), nc.autocast("cpu"):
        assert dtypes() == NATIVE
    with nc.autocast(device, policy=THREE):
        assert dtypes() == OURS
    assert traced().dtype is FP and not torch.is_autocast_enabled("cpu")


def test_an_exception_restores_everything():
    """Also one raised by an op of ours."""
    refusing = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "refuse"))
    with pytest.raises(RefusedError), nc.autocast("cpu", policy=refusing):
        F.gelu(x)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"):
        assert dtypes() == NATIVE


def test_other_threads_are_not_in_the_region():
    """As with torch: state is per thread; and a thread in a native region gets native."""
    found = []

    def work():
        found.append(dtypes())
        with torch.autocast("cpu"):
            found.append(dtypes())

    with nc.autocast("cpu", policy=THREE):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
    assert found == [[FP] * 4, NATIVE]


def test_one_instance_may_be_entered_again_and_inside_itself():
    """torch's own leaves autocast on then."""
    region = nc.autocast("cpu", policy=THREE)
    for _ in range(2):
        with region:
            with region:
                assert dtypes() == OURS
            assert dtypes() == OURS
        assert not torch.is_autocast_enabled("cpu")


def test_a_decorated_function_runs_in_the_region():
    """Also in several threads at once."""
    decorated = nc.autocast("cpu", policy=THREE)(dtypes)
    assert decorated.__name__ == "dtypes"
    found = []
    threads = [threading.Thread(target=lambda: found.append(decorated()), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [OURS] * 4 and decorated() == OURS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tpu",), "no autocast for it"),
        (("CPU",), "x.device.type"),
        ((0,), "no autocast for it"),
        (("cpu", torch.float8_e4m3fn), "8-bit formats need scales"),
        (("cpu", torch.int32), "not a format"),
        (("cpu", torch.float64), "not a format"),
        (("cpu", "fp9"), "no such format"),
    ],
)
def test_bad_regions_are_refused(arguments, said):
    """Where torch warns and switches itself off, or fails later."""
    with pytest.raises(RegionError, match=said):
        nc.autocast(*arguments)


def test_an_op_that_does_not_exist_is_an_error_when_the_region_opens():
    """For custom ops only the dispatcher knows."""
    with pytest.raises(UnknownOpError, match="nolib"):
        nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule("nolib.pool", "full")))


@pytest.mark.parametrize("name", ["einsum", "index_put", "_unsafe_index", "dequantize"])
def test_overloads_of_torchscript_alone_are_passed_by(name):
    """torch's dispatcher does not have aten.einsum.sublist, for example, though its packet of overloads does."""
    with nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule(f"aten.{name}", "full"))):
        assert lin(x).dtype is torch.bfloat16
    script_only = nc.Policy.native().with_rules(nc.Rule("aten.einsum.sublist", "full"))
    with pytest.raises(UnknownOpError, match="no such op"):
        nc.autocast("cpu", policy=script_only)


def test_dtype_may_be_named():
    """bf16 is as good as torch.bfloat16."""
    with nc.autocast("cpu", "fp16"):
        assert lin(x).dtype is torch.float16


def test_leaving_what_was_not_entered_is_an_error():
    """And changes nothing."""
    with pytest.raises(RegionError, match="not entered"):
        nc.autocast("cpu").__exit__(None, None, None)


def test_a_rule_may_name_a_module_path_a_class_or_a_function():
    """Place by place, in one model."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(8, 8)))
    found = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: found.update({name: o.dtype}))

    def run(**condition):
        policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", **condition))
        with nc.autocast("cpu", policy=policy):
            model(x)
        return found["0"], found["1.1"]

    assert run() == (FP, FP)
    assert run(module="1") == (BF, FP)
    assert run(module="1.*") == (BF, FP)
    assert run(module="0") == (FP, BF)
    assert run(module_class="Sequential") == (FP, FP)
    assert run(module_class="GELU") == (BF, BF)
    assert run(function="run") == (FP, FP)
    assert run(function="elsewhere") == (BF, BF)


def test_wrappers_add_nothing_to_a_module_path():
    """As DistributedDataParallel would."""

    class DataParallel(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    inner = torch.nn.Sequential(torch.nn.Linear(8, 8))
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="0"))
    with nc.autocast("cpu", policy=policy):
        assert inner(x).dtype is FP
        assert DataParallel(inner)(x).dtype is FP


def test_gradients_flow_through_our_casts():
    """The same bits as explicit casts."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "to(fp16)"))
    a = x.clone().requires_grad_()
    with nc.autocast("cpu", policy=policy):
        F.gelu(a).sum().backward()
    b = x.clone().requires_grad_()
    F.gelu(b.half()).sum().backward()
    assert a.grad.dtype is FP and torch.equal(a.grad, b.grad)


def test_our_weight_cache_sees_in_place_updates_and_keeps_gradients():
    """A weight is cast once while it is unchanged; a cast made under no_grad is not taken where a gradient is due."""
    weight = torch.nn.Parameter(torch.randn(8))
    policy = nc.Policy.native().with_rules(nc.Rule("aten.mul.Tensor", "lower"))
    with nc.autocast("cpu", policy=policy), nc.record() as ledger:
        with torch.no_grad():
            first = torch.mul(weight, x)
            torch.mul(weight, x)
        second = torch.mul(weight, x)
        torch.mul(weight, x)
        with torch.no_grad():
            weight.add_(1)
        third = torch.mul(weight, x)
    how = [c.how for c in ledger.casts if c.kind == "weight"]
    assert how == ["copied", "cached", "copied", "cached", "copied"]
    assert torch.equal(first, second) and not torch.equal(second, third)
    second.sum().backward()
    assert weight.grad is not None


def test_without_the_cache_every_use_casts():
    """cache_enabled=False, and the cache setting of a policy."""
    weight = torch.nn.Parameter(torch.randn(8))
    rule = nc.Rule("aten.mul.Tensor", "lower")
    off = nc.Policy("p", ((rule,),), extends=("native",), cache="off")
    for region in (nc.autocast("cpu", cache_enabled=False, policy=nc.Policy.native().with_rules(rule)),
                   nc.autocast("cpu", policy=off)):  # fmt: skip
        with nc.record() as ledger, region:
            assert not torch.is_autocast_cache_enabled()
            torch.mul(weight, x)
            torch.mul(weight, x)
        assert [c.how for c in ledger.casts if c.kind == "weight"] == ["copied", "copied"]


def test_a_kernel_that_stays_changes_nothing_for_native_regions():
    """Numbers among an op's arguments must not switch autocast off for what is inside it."""
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    inputs = torch.randn(2, 5, 16)

    def native():
        with torch.no_grad(), torch.autocast("cpu"):
            return encoder(inputs), x * 2, 2 * x.bfloat16(), torch.ones(2, dtype=torch.int32) * 2.5

    before = native()
    rules = [nc.Rule(f"aten.{name}", "full", module="nowhere") for name in ("_transformer_encoder_layer_fwd", "mul")]
    with nc.autocast("cpu", policy=nc.Policy.native().with_rules(rules)):
        encoder(inputs)
    for a, b in zip(before, native(), strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


def test_no_grad_and_inference_mode():
    """The policy holds there too."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), nc.autocast("cpu", policy=THREE):
            assert dtypes() == OURS


def test_functional_transforms_pass_through_our_kernels():
    """vmap and grad."""
    with nc.autocast("cpu", policy=THREE):
        assert torch.vmap(F.gelu)(x.bfloat16()).dtype is FP
        assert torch.func.grad(lambda t: F.gelu(t).sum())(x).dtype is FP


def dual_level_tangent(function):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent


@pytest.mark.parametrize("number", [2, 0.1, True])
@pytest.mark.parametrize("transform", ["grad", "jvp", "forward", "hessian", "jacrev", "vmap"])
def test_numbers_in_functional_transforms(transform, number):
    """A kernel of ours is called with numbers that `grad` and `jvp` wrap: torch's results in its own region, too."""

    def of(t):
        return ((t * number + number) / 3).square().sum()

    transforms = {
        "grad": lambda: torch.func.grad(of)(x),
        "jvp": lambda: torch.func.jvp(of, (x,), (x,))[1],
        "forward": lambda: dual_level_tangent(of),
        "hessian": lambda: torch.func.hessian(of)(x[0]),
        "jacrev": lambda: torch.func.jacrev(torch.func.grad(of))(x[0]),
        "vmap": lambda: torch.vmap(torch.func.grad(of))(x),
    }
    expected = transforms[transform]()
    rules = [nc.Rule(f"aten.{op}.Tensor", "full") for op in ("add", "mul", "div")]
    with nc.autocast("cpu", policy=nc.Policy.native().with_rules(rules)):
        assert torch.equal(transforms[transform](), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transforms[transform](), expected)
        with nc.capture():  # a mode that sees every op
            assert torch.equal(transforms[transform](), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint_recomputes_under_the_policy(use_reentrant, inside):
    """The backward inside the region or after it: the gradients of the same computation without checkpoint."""
    from torch.utils.checkpoint import checkpoint

    policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"), nc.Rule("aten.mul.Tensor", "to(fp16)"))
    gate = torch.nn.Parameter(torch.randn(8))

    def body(t):
        return F.gelu(lin(t)) * gate

    def gradients(run):
        a = x.clone().requires_grad_()
        lin.zero_grad()
        gate.grad = None
        with nc.autocast("cpu", policy=policy):
            loss = run(a).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return a.grad, lin.weight.grad.clone(), gate.grad.clone()

    plain = gradients(body)
    saved = gradients(lambda a: checkpoint(body, a, use_reentrant=use_reentrant))
    assert all(torch.equal(p, s) for p, s in zip(plain, saved, strict=True))


def test_checkpoint_in_a_native_region_is_native_s():
    """After regions of ours have been there."""
    from torch.utils.checkpoint import checkpoint

    with nc.autocast("cpu", policy=THREE):
        pass
    seen = []
    with torch.autocast("cpu"):
        out = checkpoint(lambda t: seen.append(dtypes()) or lin(t), x.clone().requires_grad_(), use_reentrant=False)
    out.sum().backward()
    assert seen == [NATIVE, NATIVE]


def test_half_of_a_policy_file_is_enough(tmp_path):
    """policy= takes a path."""
    file = tmp_path / "p.toml"
    THREE.save(file)
    with nc.autocast("cpu", policy=str(file)):
        assert dtypes() == OURS


def test_running_statistics_are_never_cast():
    """The schema of batch_norm does not say that it writes to them."""
    norm = torch.nn.BatchNorm1d(8, affine=False)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.*batch_norm*", "lower"))
    with nc.autocast("cpu", policy=policy), nc.record() as ledger:
        assert norm(x).dtype is BF
    assert norm.running_mean.abs().sum() > 0 and norm.running_mean.dtype is FP
    assert not {c.argument for c in ledger.casts} & {"running_mean", "running_var"}


def test_regions_left_out_of_order_leave_nothing_behind():
    """Two generators, closed in the order in which they were opened."""

    def generator():
        with nc.autocast("cpu", policy=THREE):
            yield dtypes()

    first, second = generator(), generator()
    assert next(first) == next(second) == OURS
    first.close()
    second.close()
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1
    assert not torch.is_autocast_enabled("maia") and not torch.is_autocast_enabled("mtia")
    torch.set_autocast_enabled("cpu", False)  # torch restores in the order of leaving, and so do we
    assert dtypes() == [FP] * 4


def test_a_region_stays_in_its_thread_with_asyncio():
    """asyncio.to_thread copies context variables; torch's state is per thread."""
    import asyncio

    def native():
        with torch.autocast("cpu"):
            return dtypes()

    async def run():
        with nc.autocast("cpu", policy=THREE):
            return await asyncio.to_thread(native), dtypes()

    assert asyncio.run(run()) == (NATIVE, OURS)


def test_equal_policies_keep_their_own_words():
    """Errors name the policy and the reason that were given."""
    for name in ("one", "two"):
        policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "refuse", reason=f"reason {name}"), name=name)
        with pytest.raises(RefusedError, match=f"reason {name}"), nc.autocast("cpu", policy=policy):
            F.gelu(x)


def test_module_paths_of_shared_and_moved_modules():
    """The name under which the module was called."""
    shared = torch.nn.Linear(8, 8)

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = torch.nn.Sequential(shared), torch.nn.Sequential(shared)

        def forward(self, x):
            return self.enc(x).dtype, self.dec(x).dtype

    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="dec"))
    with nc.autocast("cpu", policy=policy):
        assert Both()(x) == (BF, FP)
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return [part(x).dtype for part in self.parts]

    pair = Pair()
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="parts.0"))
    with nc.autocast("cpu", policy=policy):
        assert pair(x) == [FP, BF]
        model[0], model[1] = model[1], model[0]
        assert pair(x) == [FP, BF]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (nc.Rule("aten.linear", "full", argument="wieght"), "did you mean 'weight'"),
        (nc.Rule("aten.gelu", "full_set_dtype"), "takes no dtype"),
        (nc.Rule("aten.gelu", "full_append_dtype"), "no overload with a dtype"),
        (nc.Rule("aten.view", "full"), "patterns pass by"),
    ],
)
def test_rules_that_no_op_can_take_are_refused_when_the_region_opens(rule, said):
    """Not at run time, and not silently."""
    with pytest.raises(nc.errors.PolicyError, match=said):
        nc.autocast("cpu", policy=nc.Policy.native().with_rules(rule))


def test_a_rule_about_one_argument_leaves_the_inside_of_an_unlisted_op_to_autocast():
    """tensordot calls mm."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.tensordot", "follow", argument="self"))
    with nc.autocast("cpu", policy=policy):
        assert torch.tensordot(x, x.t(), dims=1).dtype is BF
    policy = nc.Policy.native().with_rules(nc.Rule("aten.tensordot", "full", argument="self"))
    with nc.autocast("cpu", policy=policy):
        assert torch.tensordot(x.bfloat16(), x.t(), dims=1).dtype is BF


def test_inference_tensors_are_cast_and_not_cached():
    """They have no version."""
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.randn(8))
    with torch.no_grad(), nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule("aten.mul.Tensor", "lower"))):
        assert torch.mul(weight, x).dtype is BF


@pytest.mark.parametrize("op", ["aten._to_copy.default", "aten.to.dtype", "aten.to", "aten.copy_.default"])
def test_no_rule_is_about_conversions(op):
    """The code asks for their format; a kernel of ours for them would call itself. Others are rules as before."""
    policy = nc.Policy.native().with_rules(nc.Rule(op, "full"))
    with pytest.raises(UnknownOpError, match="a conversion, whose format the code asks for"):
        nc.autocast("cpu", policy=policy).__enter__()
    with nc.autocast("cpu", policy=nc.Policy.native().with_rules(nc.Rule("aten.*", "full"))):
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).float().dtype is torch.float32
