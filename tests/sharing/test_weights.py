"""What a user refuses of a keeper's message, and that tensors arrive as they were."""

import copy
import mmap
import os

import pytest
import torch
from torch import nn

from tritium.errors import SharingError
from tritium.sharing import memory, weights, wire


class Odd(nn.Module):
    """Tensors of all kinds: tied, strided, channels-last, bytes, empty, an offset into a larger storage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        whole = torch.randn(10, 6)
        self.strided = nn.Parameter(whole.t()[1:5, ::2], requires_grad=False)
        self.register_buffer("same_storage", whole[7], persistent=False)
        self.register_buffer("float8", torch.randn(5, 3).to(torch.float8_e4m3fn))
        self.register_buffer("int8", torch.arange(7, dtype=torch.int8))
        self.register_buffer("number", torch.tensor(3.5, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("expanded", torch.ones(1, dtype=torch.bfloat16).expand(2, 3))


def message_of(module):
    described = weights.describe({"model": module})
    exports = memory.export(described.storages, "test")
    return {**described.to_message(), **exports.to_message()}, exports


@pytest.fixture
def shared():
    message, exports = message_of(Odd())
    files = exports.descriptors()
    yield message, files
    wire.close_all(files)
    exports.close()


def rebuilt(message, files):
    weights.check(message)
    return weights.views(message, memory.mapped(message, files))


def test_tensors_arrive_as_they_were():
    module = Odd()
    message, exports = message_of(module)
    files = exports.descriptors()
    found = rebuilt(message, files)
    wire.close_all(files)
    exports.close()
    tensors = {name: found[number] for name, number in message["names"]["model"].items()}
    for name, tensor in weights.named_tensors(module):
        other = tensors[name]
        assert torch.equal(other.double(), tensor.double())
        assert (other.dtype, other.stride(), other.storage_offset()) == (
            tensor.dtype,
            tensor.stride(),
            tensor.storage_offset(),
        )
        assert type(other) is type(tensor)
        assert other.requires_grad == tensor.requires_grad
        assert other.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert tensors["first.weight"] is tensors["second.weight"]
    assert tensors["strided"].untyped_storage().data_ptr() == tensors["same_storage"].untyped_storage().data_ptr()
    assert tensors["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert len(message["storages"]) == len({t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()})


def test_a_write_stays_with_the_writer(shared):
    message, files = shared
    ours, theirs = rebuilt(message, files), rebuilt(message, files)
    before = theirs[0].clone()
    with torch.no_grad():
        ours[0].zero_()
    assert torch.equal(theirs[0], before)
    assert float(ours[0].abs().max()) == 0
    # Nothing can change the file itself.
    for write in (lambda f: mmap.mmap(f, 64, prot=mmap.PROT_READ | mmap.PROT_WRITE), lambda f: os.ftruncate(f, 0)):
        with pytest.raises(OSError, match=r"Permission denied|Invalid argument|not permitted"):
            write(files[0])


CHANGES = {
    "ends after its storage": lambda m: m["tensors"][0].__setitem__(1, 9),
    "ends after its storage ": lambda m: m["tensors"][0].__setitem__(3, [1, 15]),
    "ends after its storage  ": lambda m: m["tensors"][0].__setitem__(4, "float64"),
    "ends after its storage of 0": lambda m: m["tensors"][0].__setitem__(0, -1),
    "there is no storage": lambda m: m["tensors"][0].__setitem__(0, 99),
    "there is no storage True": lambda m: m["tensors"][0].__setitem__(0, True),
    "there is no dtype 'object'": lambda m: m["tensors"][0].__setitem__(4, "object"),
    "is no tensor": lambda m: m["tensors"][0].__setitem__(2, [2**70, 1]),
    "is no tensor ": lambda m: m["tensors"][0].__setitem__(3, [-6, 1]),
    "is no tensor  ": lambda m: m["tensors"][0].pop(),
    "with gradients": lambda m: m["tensors"][-3].__setitem__(5, "yes"),
    "it names tensors": lambda m: m["names"]["model"].__setitem__("first.weight", 99),
    "it names tensors ": lambda m: m.__setitem__("names", [1]),
    "no list of tensors": lambda m: m.__setitem__("tensors", {}),
    "no list of storages": lambda m: m.__setitem__("storages", None),
    "is no storage": lambda m: m["storages"].__setitem__(0, [0, -64, 96]),
    "are not in its 1 files": lambda m: m["storages"].__setitem__(0, [1, 0, 240]),
    "are not in its 1 files ": lambda m: m["storages"].__setitem__(0, [0, 1 << 40, 240]),
    "are not in its 1 files  ": lambda m: m["storages"].__setitem__(0, [0, 3, 240]),
    "on 'meta' are not supported": lambda m: m.__setitem__("device", "meta"),
    "one handle": lambda m: m.update(device="cuda:x", storages=[[entry[-1]] for entry in m["storages"]]),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_message_that_does_not_fit_is_refused(reason, shared):
    message, files = shared
    message = copy.deepcopy(message)
    CHANGES[reason](message)
    with pytest.raises(SharingError, match=reason.strip()):
        rebuilt(message, files)


def test_only_sealed_memory_files_are_mapped(shared, tmp_path):
    message, files = shared
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, os.fstat(files[0]).st_size)
    plain = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    os.ftruncate(plain, os.fstat(files[0]).st_size)
    for file in (unsealed, plain):
        with pytest.raises(SharingError, match="no sealed memory file"):
            rebuilt(message, [file])
        os.close(file)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, "other values"),
        ([0, "", 8, 0, "", 0, ""], "other values"),
        ([0, "", 8.0, 0, "", 0, "", True], "other values"),
        ([0, "", 8, -1, "", 0, "", True], "negative"),
        ([0, "?", 8, 0, "", 0, "", True], "base64"),
    ],
)
def test_a_handle_of_cuda_is_eight_plain_values(values, reason):
    with pytest.raises(SharingError, match=reason):
        memory._handle_from_json(values, 0)
    given = (3, b"\0\xff", 8, 512, b"file", 1, b"event", True)
    assert memory._handle_from_json(memory._handle_to_json(given), 0) == (0, *given[1:])


def test_a_model_must_have_plain_weights():
    linear = nn.Linear(2, 2, device="meta")
    with pytest.raises(SharingError, match=r"model\.weight is a meta tensor"):
        weights.describe({"model": linear})


def test_a_model_gets_all_of_its_tensors(shared):
    message, files = shared
    tensors, names = rebuilt(message, files), message["names"]["model"]
    model = Odd().to("meta")
    with pytest.raises(SharingError, match=r"differs from its configuration in 1 tensors, such as int8"):
        weights.assign("model", model, {name: n for name, n in names.items() if name != "int8"}, tensors)
    model.register_buffer("int8", torch.empty(8, device="meta"))
    with pytest.raises(SharingError, match=r"model.int8 has shape \[7\], and its configuration \[8\]"):
        weights.assign("model", model, names, tensors)
    # A refused message has changed nothing.
    assert all(tensor.is_meta for _, tensor in weights.named_tensors(model))
