"""Where data sets can be had, and the checksums that their publishers or torchvision give for
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedbcd.data.cifar import FOLDER, TEST, TRAIN
from fedbcd.data.idx import EMNIST_CLASSES, MNIST_FILES, emnist_files


@dataclass(frozen=True)
class Source:
    """Files under one address.

    base      the address, up to the file name
    folder    where they go under DIR
    files     file -> "algorithm:hexadecimal digest"
    members   for an archive: which of its members are wanted -> under which name they are kept;
    nothing else is taken out of it
    """

    base: str
    folder: str
    files: Mapping[str, str]
    members: Mapping[str, str] = field(default_factory=dict)


def _mnist_like(base: str, folder: str, digests: tuple[str, ...]) -> Source:
    return Source(
        base,
        folder,
        {
            f"{file}.gz": f"sha256:{digest}"
            for file, digest in zip(MNIST_FILES, digests, strict=True)
        },
    )


SOURCES: dict[str, Source] = {
    "mnist": _mnist_like(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": _mnist_like(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    "kmnist": _mnist_like(
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        "KMNIST/raw",
        (
            "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
            "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
            "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        ),
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/",
        FOLDER,
        {
            "cifar-10-binary.tar.gz": (
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
            )
        },
        {f"{FOLDER}/{name}": name for name in (*TRAIN, TEST)},
    ),
}

# One archive of 560 MB holds every split; NIST publishes only its MD5.
_EMNIST = Source(
    "https://biometrics.nist.gov/cs_links/EMNIST/",
    "EMNIST/raw",
    {"gzip.zip": "md5:58c8d27c78d21e728a6bc7b3cc06412e"},
    {f"gzip/{file}.gz": f"{file}.gz" for split in EMNIST_CLASSES for file in emnist_files(split)},
)
SOURCES |= {
    "emnist" if split == "balanced" else f"emnist-{split}": _EMNIST for split in EMNIST_CLASSES
}
