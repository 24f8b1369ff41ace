"""The kinds of data that can be opened by name."""

KINDS = {
    "embedded": "2,000 test images of CIFAR-10, in the package",
    "cifar10": "the python version's files, or PNG files of one image a row",
    "cifar10-c": "the released .npy files",
    "cifar100": "the python version's files",
    "cifar100-c": "the released .npy files",
    "imagenet": "validation images, one folder a synset",
    "imagenet-c": "the released layout, corruption/severity/synset",
    "imagenet-r": "one folder a synset; 200 of the 1,000 classes",
    "imagenet-a": "one folder a synset; 200 of the 1,000 classes",
    "imagenet-v2": "one folder a class, named 0 to 999",
    "imagenet-sketch": "one folder a synset",
    "tiny-imagenet": "validation images of the 200 classes",
    "office-home": "Art, Clipart, Product, Real World; 65 classes",
    "domainnet": "clipart, infograph, painting, quickdraw, real, sketch; 345 or 126 classes",
    "visda-c": "train, validation, test; 12 classes",
    "pacs": "art_painting, cartoon, photo, sketch; 7 classes",
    "folder": "one folder a class, or one folder a domain with one a class in it",
    "hf": "hf:NAME@SPLIT, a data set of the Hugging Face hub (needs timm and datasets)",
}
