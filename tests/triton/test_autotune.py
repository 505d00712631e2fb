"""A search for the fastest configurations; where there is no GPU, the tests make up the times."""

import itertools
import threading

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch
from triton.runtime.errors import OutOfResources

import keras_recurrent
from keras_recurrent.backends.triton import linear_scan, rg_lru
from keras_recurrent.backends.triton._device import common
from keras_recurrent.backends.triton._runtime import search as _search
from keras_recurrent.backends.triton._runtime import torch_operators
from tests.ops import judge
from tests.ops.cases import Case, draw
from tests.triton.test_triton import ON_GPU, OPERATIONS, arguments

LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")

# Heads of one tile and of several; chains of several tiles, few chains and many.
CASES = [
    *(("linear_scan", Case(batch, 300, 20, kinds=True, state=True)) for batch in (1, 2)),
    *(("rg_lru", Case(batch, 150, 20, kinds=True, state=True)) for batch in (1, 2)),
    ("causal_conv1d", Case(1, 150, 70, kinds=True, state=True)),
    ("gated_linear_attention", Case(1, 66, 98, "bfloat16", "float32", kinds=True, state=True)),
    ("gated_linear_attention", Case(1, 40, 70, kinds=True, state=True)),
    ("lightning_attention", Case(1, 70, 130, "bfloat16", "float32", kinds=True, state=True)),
    ("lightning_attention", Case(1, 70, 70, "bfloat16", kinds=True, state=True)),
    ("lightning_attention", Case(1, 40, 70, kinds=True, state=True)),
    ("scalar_decay_attention", Case(1, 70, 130, "bfloat16", "float32", kinds=True, state=True)),
    ("sliding_window_attention", Case(1, 130, 130, "bfloat16", window=100, state=True)),
    ("sliding_window_attention", Case(1, 130, 18, "bfloat16", heads=(6, 2), window=100)),
    ("sliding_window_attention", Case(1, 70, 18, window=50)),
    ("sliding_window_attention", Case(1, 40, 130, window=30)),
]
# On a GPU, also heads of the sizes that models have: keys, values, and a length. Some sequences are
# long enough to be cut along time, where that does not take the reference too long.
HEADS = [(16, 16, 1040), (64, 64, 1040), (64, 128, 1040), (64, 66, 1040), (96, 96, 140)]
HEADS += [(128, 128, 140), (256, 256, 140), (130, 136, 140)]
# The dtypes of the tensors and of their decays, and whether the tokens have kinds.
SITUATIONS = [("bfloat16", decay, kinds) for decay in ("bfloat16", "float32") for kinds in (1, 0)]
SITUATIONS.append(("float32", "float32", 1))
CASES += [
    (operation, Case(1, length, keys, *dtypes, kinds, kinds, window=100, values=values))
    for operation in (o for o in OPERATIONS if o.endswith("attention") and ON_GPU)
    for keys, values, length in HEADS
    for *dtypes, kinds in SITUATIONS
]


@pytest.fixture(autouse=True)
def _nothing_found_yet(monkeypatch):
    monkeypatch.setattr(_search, "_fastest", {})
    monkeypatch.setattr(_search, "_open_reports", [])


@pytest.fixture
def clock(monkeypatch):
    """The times that a search measures, by the number of the candidate; an exception is raised.

    Each candidate is called twice, as on a GPU it is called repeatedly.
    """
    times = [3.0, 1.0, 2.0]
    turns = itertools.count()

    def milliseconds(call):
        time = times[next(turns) % len(times)]
        if isinstance(time, Exception):
            raise time
        for _ in range(2):
            call()
        return time

    monkeypatch.setattr(_search, "unavailable_reason", lambda: None)
    monkeypatch.setattr(_search, "milliseconds", milliseconds)
    return times


def scan(length=9, dtype="float32", **sizes):
    """Launches a kernel with three candidates; returns the GROUPS of the one that is chosen."""
    x = torch.zeros(2, length, 4, dtype=getattr(torch, dtype))
    candidates = tuple(common.Tiling(64, groups, 4, 4) for groups in (16, 8, 32))
    sizes = {"batch": 2, "length": length, "width": 4, **sizes}
    return _search.run("scan", candidates, lambda tile: tile.GROUPS, (x, None), sizes)


def test_chained_scan_tiles_have_at_most_one_thread_for_each_number():
    """See `chained_scan._wait_for`: even with the fewest channels that a tile may have."""
    for module in (linear_scan, rg_lru):
        for name in ("TILINGS", "BACKWARD_TILINGS"):
            for tile in itertools.chain(*getattr(module, name, ())):
                assert tile.num_warps * 32 <= tile.GROUPS * 16, f"{module.__name__}: {tile}"


def test_search_keeps_the_fastest_candidate(clock):
    assert scan() == 16
    with keras_recurrent.autotune() as found:
        assert scan() == 8
        assert scan() == 8
    assert scan() == 8
    (search,) = found
    assert search.fastest.milliseconds == 1.0
    assert search.fastest.configuration["GROUPS"] == 8
    assert [t.milliseconds for t in search.timings] == [3.0, 1.0, 2.0]
    assert str(search) == (
        "scan on cpu: batch <= 2, length <= 16, width 4 (float32, None)\n"
        "    3.0000 ms  BLOCK_D=64 GROUPS=16 ROWS=4 num_warps=4\n"
        "*   1.0000 ms  BLOCK_D=64 GROUPS=8 ROWS=4 num_warps=4\n"
        "    2.0000 ms  BLOCK_D=64 GROUPS=32 ROWS=4 num_warps=4"
    )


def test_search_key_rounds_lengths_and_separates_dtypes(clock):
    with keras_recurrent.autotune() as found:
        for length in (9, 16, 12):
            scan(length)
        assert len(found) == 1
        scan(17)
        scan(dtype="bfloat16")
        scan(width=5)
        scan(batch=3)
        assert len(found) == 5
    with keras_recurrent.autotune() as found:
        scan(31)
        assert not found
        with keras_recurrent.autotune() as inner:
            scan(33)
        scan(65)
    assert len(found) == 2
    assert inner == found[:1]
    assert scan(129) == 16  # not searched: no block is open


def test_search_skips_candidates_without_resources(clock):
    clock[:] = [OutOfResources(300_000, 200_000, "shared memory"), 2.0, 1.0]
    with keras_recurrent.autotune() as found:
        assert scan() == 32
    assert [t.milliseconds for t in found[0].timings] == [None, 2.0, 1.0]
    assert "no room  BLOCK_D=64 GROUPS=16" in str(found[0])


@pytest.mark.parametrize("error", [OutOfResources(3, 2, "registers"), RuntimeError("a bug")])
def test_search_raises_if_all_candidates_fail(clock, error):
    clock[:] = [error]
    with keras_recurrent.autotune() as found, pytest.raises(type(error)):
        scan()
    assert not found
    assert scan() == 16


def test_search_during_graph_capture_raises(monkeypatch):
    monkeypatch.setattr(_search, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with keras_recurrent.autotune(), pytest.raises(RuntimeError, match="before the capture"):
        scan()


@pytest.mark.nightly
@pytest.mark.parametrize(("operation", "case"), CASES)
def test_candidates_match_the_reference(operation, case, clock, monkeypatch):
    """In the interpreter, which ignores warps and registers, only those with different tiles."""
    monkeypatch.setattr(common, "_MANY_CHAINS", 2)
    most = 2  # different candidates of a kernel, as far as seen
    number = 0  # of the candidate that is tried; 0 is the default

    def timed(launch, candidates):
        nonlocal most
        first = {}
        for i, candidate in enumerate(candidates):
            tiles = {
                n: v for n, v in candidate._asdict().items() if ON_GPU or n not in LAUNCH_OPTIONS
            }
            first.setdefault(tuple(tiles.values()), i)
        different = list(first.values())
        most = max(most, len(different))
        chosen = different[number % len(different)]
        try:
            launch(candidates[chosen])
        except _search._OUT_OF_RESOURCES:  # a search on this GPU would not choose it
            chosen = 0
        return [float(i != chosen) for i in range(len(candidates))]

    monkeypatch.setattr(_search, "timed", timed)
    while (number := number + 1) < most:
        _search._fastest.clear()
        with keras_recurrent.autotune():
            judge.check(operation, "triton", draw(operation, case))


@pytest.mark.parametrize("operation", ["linear_scan", "rg_lru"])
def test_search_allocates_carry_for_each_launch(operation, clock, monkeypatch):
    """On a GPU, a launch would take states that an earlier one left there for its own."""
    allocate, made = torch_operators.allocate, []

    def counted(array, like):
        made.append(allocate(array, like))
        return made[-1] if array.zeros else made.pop()

    monkeypatch.setattr(torch_operators, "allocate", counted)
    with keras_recurrent.autotune() as found:
        judge.check(operation, "triton", draw(operation, Case(1, 20, 8)))
    assert len(made) == sum(2 * len(search.timings) + 1 for search in found)


def test_search_in_the_backward_thread_is_shared(clock):
    """As autograd runs it on a GPU."""
    tensors = {n: t.requires_grad_() for n, t in arguments("rg_lru", 20).items()}
    with keras_recurrent.autotune() as found:
        output, _ = keras_recurrent.ops.rg_lru(**tensors, implementation="triton")
        thread = threading.Thread(target=output.sum().backward)
        thread.start()
        thread.join()
    assert [search.kernel for search in found] == ["rg_lru", "rg_lru backward"]


def test_search_runs_in_compiled_functions(clock):
    def function(x, log_a):
        return keras_recurrent.ops.linear_scan(x, log_a, implementation="triton")[0]

    compiled = torch.compile(function, backend="eager")
    tensors = arguments("linear_scan", 20)
    expected = function(**tensors)
    with keras_recurrent.autotune() as found:
        result = compiled(**tensors)
    assert [search.kernel for search in found] == ["linear_scan"]
    torch.testing.assert_close(result, expected)


@pytest.mark.skipif(not ON_GPU, reason="times on a GPU")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_search_on_a_gpu_times_all_candidates(operation):
    drawn = draw(operation, Case(2, 500, 64, "bfloat16", kinds=True, state=True))
    with keras_recurrent.autotune() as found:
        judge.check(operation, "triton", drawn)
    for search in found:
        assert search.timings[0].milliseconds > 0
        assert search.fastest.milliseconds <= search.timings[0].milliseconds
    before = list(found)
    judge.check(operation, "triton", drawn)
    assert found == before
