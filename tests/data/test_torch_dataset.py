"""Data sets as PyTorch knows them."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import fata


@pytest.fixture(scope="module")
def data():
    return fata.data.open("embedded", fit=fata.zoo.load("mini_resnet_gn"))


def test_it_is_a_torch_data_set_of_what_is_on_the_disk(data):
    assert isinstance(data, Dataset)
    assert len(data) == 2000
    clean = next(iter(fata.stream(data, domains=["clean"])))
    image, label = data[int(clean.index[0])]
    assert torch.equal(image, clean.images[0].cpu())
    assert label == int(clean.labels[0])
    assert data[-1][1] == data[1999][1]
    with pytest.raises(IndexError):
        data[2000]


def test_a_domain_is_corrupted_as_in_a_stream(data):
    fog = data.domain("fog", severity=3)
    batch = next(iter(fata.stream(data, domains=["fog"], severity=3, images=16)))
    for image, index, label in zip(batch.images, batch.index, batch.labels, strict=True):
        own, its = fog[int(index)]
        assert torch.equal(own, image.cpu())
        assert its == int(label)


def test_a_loader_takes_it(data):
    images, labels = next(iter(DataLoader(Subset(data.domain("fog"), range(8)), batch_size=4)))
    assert images.shape == (4, 3, 32, 32)
    assert labels.tolist() == [data[index][1] for index in range(4)]


def test_they_read_as_one_line(data):
    assert repr(data) == "Dataset('embedded', 10 classes, 20 domains, corruptions made)"
    assert repr(data.domain("fog")) == "DomainImages('embedded', 'fog-5', 2,000 images)"
