"""MACs by hand and by torch's own counter, the paper's figures, the state's size, the command."""

import math

import pytest
import timm
import torch
import typer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import fata
from fata.bench import cost
from fata.bench.cost import Macs, effective, passes, rows
from fata.commands.cost import cost as command
from fata.methods import SPECS
from fata.methods.losses import entropy

IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SELECTIVE = ("eata", "sar", "deyo", "nctta", "fata")
ALL_OR_NOTHING = ("source", "norm", "neo", "tent", "zerosiam", "tent+fata", "cotta", "memo")
SELECTIVE += ("eata+fata", "sar+fata", "deyo+fata", "nctta+fata")


@pytest.fixture(scope="module")
def resnet50():
    return timm.create_model("resnet50_gn", num_classes=65).eval()


def one_share(net, spec, share, guard=None):
    """An adapter whose terms all select the same share of IMAGES, and hardly moves.

    Its first batch is behind it: the engine knows the share, the tap its way.
    """
    torch.manual_seed(0)
    model = fata.tiny.build(net)
    head = model.head if net == "vit_ln" else model.fc
    head.weight.data *= 30  # sure of some images, unsure of others
    with fata.adapt(model, "norm").frozen() as plain:
        found = (entropy(plain(IMAGES)) / math.log(10)).sort().values
    plain.unwrap()
    count = round(share * len(IMAGES))
    threshold = ((found[count - 1] + found[count]) / 2).item() if count < len(found) else 1.0
    fields = {
        "eata": {"threshold": threshold, "redundancy": 2.0, "fisher_alpha": 0.0},
        "sar": {"threshold": threshold, "rho": 0.0, "recovery": 0.0},
        "deyo": {"threshold": threshold, "plpd_threshold": -1.0},
        "nctta": {"threshold": threshold},
        "roid": {"augment": lambda images: images},
        "memo": {"views": 2, "augment": lambda image, views: image.expand(views, -1, -1, -1)},
        "cotta": {"views": 2, "threshold": 1.0, "augment": lambda images: images},
    }.get(spec.partition("+")[0], {})
    if "fata" in spec:
        fields["fata_threshold"] = threshold
    adapter = fata.adapt(model, spec, lr=1e-9, guard=guard, **fields)
    adapter(IMAGES)
    return adapter


def of_one_batch(adapter, work=lambda run: run()):
    """What the counters gained in a batch."""
    before = adapter.counts
    work(lambda: adapter(IMAGES))
    return {name: adapter.counts[name] - before[name] for name in before if "rows" in name}


# -- F and T ----------------------------------------------------------------------------------


def test_the_papers_figures(resnet50):
    adapter = fata.adapt(resnet50, "tent+fata")
    whole, tail = passes(adapter, torch.rand(1, 3, 224, 224))
    adapter.unwrap()
    figures = {
        "eata": 4.11,
        "eata+fata": 4.92,
        "sar": 8.22,
        "sar+fata": 14.76,
        "deyo": 8.22,
        "deyo+fata": 9.03,
        "cotta": 143.83,
    }
    for spec, gmacs in figures.items():
        assert cost.paper(spec, whole, tail) / 1e9 == pytest.approx(gmacs, abs=0.01), spec
    ours = effective(rows("sar+fata", 0.4), whole, tail)
    assert ours.total < 0.8 * cost.paper("sar+fata", whole, tail)  # which has no way back


def test_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.GroupNorm(2, 8),
        nn.Flatten(), nn.Linear(8 * 64, 10),
    )  # fmt: skip
    first, norm1, second, norm2, head = 64 * 4 * 27, 2 * 4 * 64, 64 * 8 * 9, 2 * 8 * 64, 8 * 64 * 10
    forward = first + norm1 + second + norm2 + head
    images = torch.rand(3, 3, 8, 8)

    adapter = fata.adapt(model, "tent+fata", params="norm", layer="3")
    whole, tail = passes(adapter, images)
    assert whole == Macs(forward, norm1 + second + 2 * norm2 + head)
    assert tail == Macs(norm2 + head, 2 * norm2 + head)
    adapter.unwrap()

    adapter = fata.adapt(model, "tent+fata", params=["4"], layer="2")
    whole, tail = passes(adapter, images)
    assert whole == Macs(forward, norm2 + head)  # nothing before the first that adapts
    assert tail == Macs(second + norm2 + head, norm2 + head)
    adapter.unwrap()

    adapter = fata.adapt(model, "cotta")
    assert passes(adapter, images) == (
        Macs(forward, first + 2 * (norm1 + second + norm2 + head)),
        Macs(0),
    )


@pytest.mark.parametrize("spec", ["source", "tent"])
def test_products_inside_attention_count(spec):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # projects by itself
            self.head = nn.Linear(8, 10)

        def forward(self, x):
            x = self.norm(x)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    adapter = fata.adapt(Attends().eval(), spec)
    whole, _ = passes(adapter, torch.rand(1, 5, 8))
    projections, products = 4 * 5 * 8 * 8, 2 * 5 * 5 * 8
    assert whole.forward == 2 * 5 * 8 + projections + products + 8 * 10
    way_back = 2 * 5 * 8 + projections + 2 * products + 8 * 10
    assert whole.backward == (way_back if spec == "tent" else 0)


# -- what the engine spends --------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.75])
@pytest.mark.parametrize("spec", SELECTIVE)
@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn"])
def test_rows_are_those_the_engine_counts(net, spec, share):
    adapter = one_share(net, spec, share)
    expected = rows(spec, share, coupled=net == "resnet_bn")
    found = of_one_batch(adapter)
    assert {on.float().mean().item() for on in adapter.selected.values()} <= {share, 0.0}
    assert {name: count / len(IMAGES) for name, count in found.items()} == expected


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_effective_is_what_torch_counts(net, spec, monkeypatch):
    monkeypatch.setattr(cost, "norm_layers", lambda model: [])  # torch does not count them
    adapter = one_share(net, spec, 0.25, guard=fata.Guard(level=0.0))
    whole, tail = passes(adapter, IMAGES[:1])
    counter = FlopCounterMode(display=False)

    def counted(run):
        with counter, sdpa_kernel(SDPBackend.MATH):
            run()

    spent = effective(of_one_batch(adapter, counted), whole, tail)
    found, beside = counter.get_total_flops() / 2, spec.startswith(("nctta", "zerosiam"))
    assert found <= 1.02 * spent.total if beside else found == spent.total  # products with W
    assert (spent.backward > 0) == (spec not in ("source", "norm", "neo"))


@pytest.mark.parametrize("spec", ALL_OR_NOTHING)
def test_rows_of_methods_that_select_nothing_or_all(spec):
    adapter = one_share("resnet_gn", spec, 0.25)
    found = {n: count / len(IMAGES) for n, count in of_one_batch(adapter).items()}
    full = rows(spec, 0.25)
    if spec == "cotta":  # 2 views here, 32 there
        full["rows_forward"] -= 30
    if spec == "memo":  # 2 views here, 64 there
        full = {name: count and count - 62 for name, count in full.items()}
    assert found == full


@pytest.mark.parametrize("spec", ["roid", "roid+fata"])
@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn"])
def test_rows_of_views_are_those_the_engine_counts(net, spec, monkeypatch):
    """Of the selected rows alone, without BatchNorm, as many as they are."""
    adapter = one_share(net, spec, 1.0)
    adapter._live().state.share = 0.0
    monkeypatch.setattr(cost, "DENSE", 2.0)
    found = of_one_batch(adapter)
    share = torch.stack([*adapter.selected.values()]).any(0).float().mean().item()
    expected = rows(spec, share, coupled=net == "resnet_bn")
    assert {name: count / len(IMAGES) for name, count in found.items()} == expected


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("spec", SELECTIVE)
def test_where_nothing_is_selected_a_pass_is_all(spec, coupled):
    none = {"rows_tail": 0, "rows_backward": 0, "rows_source": 0}
    assert rows(spec, 0.0, coupled) == {"rows_forward": 1, **none}


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"share=.*\[0, 1\]"):
        rows("eata", share)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"unknown method 'sarfata'.*Did you mean"):
        cost.paper("sarfata", Macs(1), Macs(1))
    assert set(cost.PAPER) == set(SPECS)


# -- the whole -----------------------------------------------------------------------------------


def test_the_state_is_what_a_file_would_hold():
    sizes = {}
    for spec in SPECS:
        model = fata.tiny.build("resnet_gn")
        sizes[spec] = cost.cost(model, spec, IMAGES[:2], 0.4).state
    every = sum(p.numel() for p in model.parameters())
    norms = {
        "all": sum(p.numel() for n, p in model.named_parameters() if "norm" in n or "bn" in n),
        "truncated": 2 * (8 + 2 * (8 + 16 + 24)),
    }
    assert sizes["source"] == sizes["norm"] == sizes["memo"] == 0
    assert sizes["tent"] == sizes["deyo"] == 2 * 4 * norms["truncated"]
    assert sizes["sar"] == sizes["tent"] + 4  # a mean entropy
    assert sizes["eata"] == 2 * 4 * norms["all"] + 4 * 10 + 1  # a mean prediction, and whether
    assert sizes["neo"] == 4 * 32 + 8  # a mean feature, and of how many
    assert sizes["cotta"] == 3 * 4 * every  # student, momentum, teacher
    for host in ("tent", "eata", "sar", "deyo"):
        assert sizes[f"{host}+fata"] == sizes[host] + 4 * 24  # a moving average by channel


@pytest.mark.parametrize("spec", SPECS)
def test_the_model_is_as_it_was(spec):
    model = fata.tiny.build("resnet_bn")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    found = cost.cost(model, spec, IMAGES[:2], 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(module._forward_hooks for module in model.modules())
    assert found.paper >= found.whole.forward > found.tail.forward
    assert found.ours == effective(rows(spec, 1.0, coupled=True), found.whole, found.tail)


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def call():
    app = typer.Typer()
    app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_the_command_shows_both(call):
    result = call("--model", "mini_resnet_gn", "--methods", "eata, sar+fata", "--share", "0.5")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("mini_resnet_gn, 10 classes, 32 x 32 pixels")
    assert "50% of the rows selected, passed again" in result.output
    model = fata.zoo.sources.architecture("mini_resnet_gn").build(10)
    lines = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line}
    for spec in ("eata", "sar+fata"):
        found = cost.cost(model, spec, torch.rand(2, 3, 32, 32), 0.5)
        macs = (found.paper, found.ours.forward, found.ours.backward, found.ours.total)
        assert lines[spec] == [
            *(f"{m / 1e9:.4f}" for m in macs),
            f"{found.state / 1024:.1f}",
            "KiB",
        ]


def test_the_command_takes_classes_and_size(call):
    sizes = {}
    for classes in ("10", "1000"):
        result = call(
            "--model", "mini_resnet_bn", "--methods", "cotta", "--classes", classes, "--size", "48"
        )
        assert f"mini_resnet_bn, {classes} classes, 48 x 48 pixels" in result.output
        sizes[classes] = float(result.output.split()[-2])
    assert sizes["1000"] > sizes["10"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "nope"], "unknown architecture 'nope': choose one of resnet50_bn"),
        (["--model", "mini_resnet"], "Did you mean 'mini_resnet_gn'"),
        (["--model", "timm:nope"], "timm has no 'nope'"),
        (["--model", "mini_vit", "--methods", "eat"], "unknown method 'eat'"),
        (["--model", "mini_vit", "--methods", ","], "give some, such as"),
        (["--model", "mini_vit", "--size", "20"], "does not take 20 x 20 images"),
        (["--model", "mini_vit", "--share", "2"], "share"),
    ],
)
def test_the_command_says_what_is_wrong(call, arguments, told):
    result = call(*arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())
