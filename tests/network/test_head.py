"""The classifier and the penultimate feature of networks that know nothing of either."""

import pytest
import timm
import torch
from torch import nn

import fata
from fata.network.head import Head
from fata.network.logits import restrict
from precision import DOUBLE


class TwoHeads(nn.Module):
    """The last linear layer is an auxiliary one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.fc = nn.Linear(12, 5)
        self.auxiliary = nn.Linear(12, 5)

    def forward(self, x):
        z = self.norm(x.flatten(1))
        self.auxiliary(z)
        return self.fc(z)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("vit_tiny_patch16_224", "head"),
        ("convnext_atto", "head.fc"),
        ("swin_tiny_patch4_window7_224", "head.fc"),
        ("mobilenetv3_small_050", "classifier"),
    ],
)
def test_it_finds_the_classifier(name, head):
    model, images = timm.create_model(name, num_classes=7).eval(), torch.rand(2, 3, 224, 224)
    found = Head(model)
    found.check(model, images)
    with torch.no_grad():
        logits = model(images)
        z = found.take()
        assert found.name == head
        torch.testing.assert_close(found(z), logits)
        assert found.weight.shape == (7, z.shape[1])
    found.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_classifier_that_cannot_be_found_is_to_be_named():
    images = torch.rand(4, 12)
    with pytest.raises(ValueError, match=r"'auxiliary' does not give them\. Name it: head=\.\.\."):
        fata.adapt(TwoHeads(), "neo")(images)
    assert fata.adapt(TwoHeads(), "neo", head="fc")(images).shape == (4, 5)
    with pytest.raises(ValueError, match=r"no such linear layer.*Candidates: 'fc', 'auxiliary'"):
        fata.adapt(TwoHeads(), "neo", head="norm")
    with pytest.raises(ValueError, match="has no linear layer"):
        fata.adapt(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), "neo")
    with pytest.raises(TypeError, match=r"Neo\(head=3\): give the name"):
        fata.adapt(TwoHeads(), "neo", head=3)


def test_a_failed_first_batch_leaves_the_model_free():
    model = TwoHeads()
    adapter = fata.adapt(model, "neo")
    with pytest.raises(ValueError, match="Name it"):
        adapter(torch.rand(4, 12))
    assert adapter.unwrap() is model
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_classes_that_are_left_out_have_no_row_in_it():
    model = fata.tiny.build("vit_ln").double().eval()
    images = torch.rand(4, 3, 16, 16).double()
    restrict(model, [7, 2, 4])
    head = Head(model)
    head.check(model, images)
    with torch.no_grad():
        logits = model(images)
        torch.testing.assert_close(head(head.take()), logits, **DOUBLE)
    assert torch.equal(head.weight, model.head.weight[[7, 2, 4]])
