"""The roofline counts kernels, bytes and operations of a module as one would by hand."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from scripts.gpu_compile.ceilings import Ceiling, violations
from scripts.gpu_compile.devices import GPUS
from scripts.gpu_compile.forecast import Forecast, Load, token_flops, work
from scripts.gpu_compile.hlo import Module
from scripts.gpu_compile.programs import largest_plan
from scripts.gpu_compile.roofline import Cost, Group, Work, cost
from scripts.gpu_compile.shapes import MODELS

GPU = replace(GPUS["h200"], bandwidth=1e12, flops=1e15)
MODULE = """HloModule jit_run

%fused_scale (p: f32[1024,1024], q: f32[4,1024,1024], i: s32[]) -> f32[4,1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  %q = f32[4,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %view = f32[1,1024,1024]{2,1,0} bitcast(%p)
  ROOT %put = f32[4,1024,1024]{2,1,0} dynamic-update-slice(%q, %view, %i, %i, %i)
}

%fused_turn (p.1: f32[4,1024,1024]) -> f32[1024,4,1024] {
  %p.1 = f32[4,1024,1024]{2,1,0} parameter(0)
  ROOT %turned = f32[1024,4,1024]{2,1,0} transpose(%p.1), dimensions={1,0,2}
}

%body (state: (s32[], f32[4,1024,1024])) -> (s32[], f32[4,1024,1024]) {
  %state = (s32[], f32[4,1024,1024]{2,1,0}) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %all = f32[4,1024,1024]{2,1,0} get-tuple-element(%state), index=1
  %one = f32[1024,1024]{1,0} custom-call(%at), custom_call_target="something"
  %put.1 = f32[4,1024,1024]{2,1,0} fusion(%one, %all, /*index=2*/%at), kind=kLoop, calls=%fused_scale
  ROOT %next = (s32[], f32[4,1024,1024]{2,1,0}) tuple(%at, %put.1)
}

%condition (state.1: (s32[], f32[4,1024,1024])) -> pred[] {
  %state.1 = (s32[], f32[4,1024,1024]{2,1,0}) parameter(0)
  %at.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %more = pred[] compare(%at.1, %at.1), direction=LT
}

%rare (x: f32[4,1024,1024]) -> f32[4,1024,1024] {
  %x = f32[4,1024,1024]{2,1,0} parameter(0)
  ROOT %negated = f32[4,1024,1024]{2,1,0} negate(%x)
}

%usual (x.1: f32[4,1024,1024]) -> f32[4,1024,1024] {
  ROOT %x.1 = f32[4,1024,1024]{2,1,0} parameter(0)
}

ENTRY %main (x.2: bf16[512,2048], w: bf16[2048,256], state.2: (s32[], f32[4,1024,1024])) -> bf16[] {
  %x.2 = bf16[512,2048]{1,0} parameter(0)
  %w = bf16[2048,256]{1,0} parameter(1)
  %state.2 = (s32[], f32[4,1024,1024]{2,1,0}) parameter(2)
  %loop = (s32[], f32[4,1024,1024]{2,1,0}) while(%state.2), condition=%condition, body=%body, LOOP
  %all.1 = f32[4,1024,1024]{2,1,0} get-tuple-element(%loop), index=1
  %forward = f32[2,1024]{1,0} custom-call(%all.1), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(run)/pallas_call"}
  %backward = f32[2,1024]{1,0} custom-call(%all.1), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(run)/attention_backward/pallas_call"}
  %turned.1 = f32[1024,4,1024]{2,1,0} fusion(%all.1), kind=kLoop, calls=%fused_turn, metadata={op_name="jit(run)/turn"}
  %some = pred[] custom-call(%all.1), custom_call_target="something"
  %chosen = f32[4,1024,1024]{2,1,0} conditional(%some, %all.1, %all.1), true_computation=%rare, false_computation=%usual, metadata={op_name="jit(run)/seldom/cond"}
  ROOT %y = (bf16[512,256]{1,0}, s8[33554432]{0}) custom-call(%x.2, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}
"""  # noqa: E501
KNOWN = 'metadata={op_name="jit(run)/while"}, backend_config={"known_trip_count":{"n":"3"}}'
NAMED = 'metadata={op_name="jit(run)/chunks/while"}'


def counted(loop: str, **of_work: Any) -> Cost:
    return cost(Module.parse(MODULE.replace("LOOP", loop)), GPU, Work(**of_work))


def test_loops_multiply_and_only_the_branch_that_is_taken_counts() -> None:
    """Two kernels per round, and a third that compares if the host has to know the result; two of
    attention, a transpose, a predicate and a product; a negation in the branch.
    """
    assert counted(KNOWN, is_taken={"seldom": False}).kernels == 3 * 2 + 5
    assert counted(KNOWN, is_taken={"seldom": True}).kernels == 3 * 2 + 6
    named = counted(NAMED, rounds={"chunks": 5}, is_taken={"seldom": False})
    assert named.kernels == 5 * 2 + 6 + 5


def test_a_loop_or_conditional_without_a_name_is_refused_with_its_place() -> None:
    with pytest.raises(LookupError, match=r"chunks/while' is in the scope 'chunks', "):
        counted(NAMED, rounds={"pages": 5}, is_taken={"seldom": False})
    with pytest.raises(LookupError, match="the conditional"):
        counted(KNOWN)


def test_kernels_take_as_long_as_their_bytes_or_their_operations() -> None:
    """A slice of 4 MiB is read and written in place, in each of 3 rounds; the loop's other kernel
    writes 4 MiB; the transpose reads and writes 16; at 0.83 TB/s.
    """
    found = counted(KNOWN, is_taken={"seldom": False})
    mib = 2**20 / 0.83e12
    assert found.seconds[Group.INDEXED] == pytest.approx(3 * 8 * mib)
    assert found.seconds[Group.ELEMENTWISE] == pytest.approx((3 * 4 + 32) * mib + 1 / 0.83e12)
    assert found.flops == 2 * 512 * 256 * 2048


def test_a_product_does_not_pay_for_the_library_s_room() -> None:
    """Its factors and its result take 3.25 MiB, which last longer than its tiles; the library's
    room has 32 MiB.
    """
    found = counted(KNOWN, is_taken={"seldom": False}).seconds[Group.PRODUCTS]
    assert found == pytest.approx(3.25 * 2**20 / 0.83e12)


def test_attention_costs_its_operations_and_each_backward_kernel_a_quarter_more() -> None:
    found = counted(KNOWN, is_taken={"seldom": False}, attention_flops=3e12)
    assert found.seconds[Group.ATTENTION] == pytest.approx((1 + 1.25) * 3e12 / (0.22 * 1e15))


def test_attention_writes_the_blocks_of_one_layer() -> None:
    """The results of 64 layers are in one array; those of one are 4 MiB, for 64 blocks of 16."""
    module = """HloModule jit_run
ENTRY %main (seen: s32[64,16], q: f32[4096,1024,16]) -> f32[4096,1024,16] {
  %seen = s32[64,16]{1,0} parameter(0)
  %q = f32[4096,1024,16]{2,1,0} parameter(1)
  ROOT %out = f32[4096,1024,16]{2,1,0} custom-call(%seen, %q), custom_call_target="triton", metadata={op_name="jit(run)/pallas_call"}
}
"""  # noqa: E501
    found = cost(Module.parse(module), GPU, Work())
    assert found.seconds[Group.ATTENTION] == pytest.approx(4 * 2**20 / 0.83e12)


def test_small_kernels_of_decoding_cost_their_arrays_but_the_pages() -> None:
    """Queries of 64 MiB in bfloat16, read and written; the pages have 1 GiB each way."""
    module = """HloModule jit_run
ENTRY %main (q: bf16[32768,1024], k: bf16[8,8,128,65536]) -> (bf16[32768,1024], bf16[8,8,128,65536]) {
  %q = bf16[32768,1024]{1,0} parameter(0)
  %k = bf16[8,8,128,65536]{3,2,1,0} parameter(1)
  ROOT %out = (bf16[32768,1024]{1,0}, bf16[8,8,128,65536]{3,2,1,0}) custom-call(%q, %k), custom_call_target="triton", metadata={op_name="jit(run)/rotate_and_write/pallas_call"}
}
"""  # noqa: E501
    found = cost(Module.parse(module), GPU, Work(attention_flops=1e15, page_bytes=1e9))
    assert found.seconds[Group.ATTENTION] == pytest.approx(2 * 2**26 / 0.83e12)


def test_attention_over_pages_costs_the_pages_it_reads() -> None:
    """Its table of 1 KiB, its result of 8 MiB, and pages of 1 GB, at 0.83 TB/s."""
    module = """HloModule jit_run
ENTRY %main (table: s32[256]) -> f32[2048,1024] {
  %table = s32[256]{0} parameter(0)
  ROOT %out = f32[2048,1024]{1,0} custom-call(%table), custom_call_target="triton", metadata={op_name="jit(run)/paged_attention/pallas_call"}
}
"""  # noqa: E501
    found = cost(Module.parse(module), GPU, Work(attention_flops=1e15, page_bytes=1e9))
    assert found.seconds[Group.ATTENTION] == pytest.approx((2**23 + 1e9) / 0.83e12)


def test_shared_adapters_cost_those_in_use_once() -> None:
    """By hand: a result of 1 MiB, rows of 1 KiB, and 2 of 4 slots of 128 KiB in one of 3 layers.

    They are read at 0.42 TB/s, after 3 microseconds.
    """
    module = """HloModule jit_run
ENTRY %main (x: f32[256], a: f32[12,8,4096]) -> f32[262144] {
  %x = f32[256]{0} parameter(0)
  %a = f32[12,8,4096]{2,1,0} parameter(1)
  ROOT %out = f32[262144]{0} custom-call(%x, %a), custom_call_target="triton", metadata={op_name="jit(run)/shared_lora/pallas_call"}
}
"""  # noqa: E501
    found = cost(Module.parse(module), GPU, Work(adapters=2))
    seconds = 3e-6 + (2**20 + 2**10 + 2 * 2**17) / 0.42e12
    assert found.seconds[Group.PRODUCTS] == pytest.approx(seconds)


def test_a_product_of_few_rows_reads_its_weights_after_a_start() -> None:
    """Weights of 8 MiB, 8 rows of 4 KiB and as many results, at 0.83 TB/s after 4 microseconds."""
    module = """HloModule jit_run
ENTRY %main (x: bf16[8,2048], w: bf16[2048,2048]) -> bf16[8,2048] {
  %x = bf16[8,2048]{1,0} parameter(0)
  %w = bf16[2048,2048]{1,0} parameter(1)
  ROOT %y = bf16[8,2048]{1,0} custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}
"""  # noqa: E501
    found = cost(Module.parse(module), GPU, Work())
    seconds = 4e-6 + (2**23 + 2 * 2**15) / 0.83e12
    assert found.seconds[Group.PRODUCTS] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "result", "operands", "moved", "flops"),
    [
        # 16 blocks of 64 tokens, 3 layers of 4 slots, matrices of 256 x 32: 2^23 products.
        (
            "contract",
            "f32[1,2,16,64,32]",
            ("bf16[16,64,256]", "f32[12,256,32]"),
            4 * 2 * 2**15 + 2 * 2**18 + 2 * 4 * 2**13,
            3 * 2**24,
        ),
        (
            "contract",
            "f32[1,2,16,64,32]",
            ("f32[16,64,256]", "f32[12,32,256]"),
            4 * 2 * 2**15 + 4 * 2**18 + 2 * 4 * 2**13,
            6 * 2**24,
        ),
        (
            "expand",
            "bf16[16,64,256]",
            ("f32[1,16,64,32]", "f32[12,32,256]", "f32[16,64,256]"),
            2 * 2**18 + 4 * 2**15 + 2 * 4 * 2**13 + 4 * 2**18,
            6 * 2**24,
        ),
        (
            "gradient",
            "f32[12,256,32]",
            ("bf16[16,64,256]", "f32[1,16,64,32]", "f32[12,256,32]"),
            2 * 2**18 + 4 * 2**15 + 2 * 2 * 4 * 2**13,
            3 * 2**24,
        ),
    ],
)
def test_adapters_in_training_cost_those_of_a_chunk_and_the_products_of_their_parts(
    name: str, result: str, operands: tuple[str, ...], moved: int, flops: int
) -> None:
    """By hand, with two adapters in the chunk. A gradient is read and written.

    A kernel reads and multiplies in turn, and a gap follows.
    """
    layouts = {3: "{2,1,0}", 4: "{3,2,1,0}", 5: "{4,3,2,1,0}"}

    def laid_out(shape: str) -> str:
        return shape + layouts[shape.count(",") + 1]

    given = [f"  %x{i} = {laid_out(shape)} parameter({i})" for i, shape in enumerate(operands)]
    called = ", ".join(f"%x{i}" for i in range(len(operands)))
    parameters = ", ".join(f"x{i}: {shape}" for i, shape in enumerate(operands))
    module = "\n".join(
        (
            "HloModule jit_run",
            f"ENTRY %main ({parameters}) -> {result} {{",
            *given,
            f"  ROOT %out = {laid_out(result)} custom-call({called}), "
            'custom_call_target="triton", '
            f'metadata={{op_name="jit(run)/block_lora_{name}/pallas_call"}}',
            "}",
        )
    )
    found = cost(Module.parse(module), GPU, Work(chunk_adapters=2))
    assert found.flops == flops
    seconds = moved / 0.83e12 + flops / 0.3e15
    assert found.seconds[Group.PRODUCTS] == pytest.approx(seconds)
    assert found.places.total() == pytest.approx(max(1.5e-6, seconds) + 1.7e-6)


def test_loops_whose_end_the_device_decides_and_conditionals_cost_the_host_a_look() -> None:
    known = counted(KNOWN, is_taken={"seldom": False}).seconds[Group.LAUNCHES]
    named = counted(NAMED, rounds={"chunks": 3}, is_taken={"seldom": False}).seconds[Group.LAUNCHES]
    assert named - known == pytest.approx(4 * (12e-6 + 1.5e-6 + 1.7e-6), rel=1e-3)
    assert known >= 10e-6


def test_copies_of_16_mib_are_listed_with_their_place_and_slices_in_place_are_not() -> None:
    assert counted(KNOWN, is_taken={"seldom": False}).copies == {
        "f32[1024,4,1024] jit(run)/turn": 2**24
    }


def test_a_text_without_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        Module.parse("not a module")


def test_operations_per_token_are_those_of_the_products_and_of_attention() -> None:
    """Qwen3-0.6B by hand: 28 layers of 15,728,640 weights, and a tied table of 151,936 x 1,024."""
    config = MODELS["qwen3-0.6b"]
    layer = 1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072
    assert layer == 15_728_640
    weights = 28 * layer + 151_936 * 1024
    attention = 28 * 2 * 2 * 16 * 128 * 512  # scores and sums, over 512 positions on average
    assert token_flops(config, 1024, is_trained=False) == 2 * weights + attention
    assert token_flops(config, 1024, is_trained=True) == 4 * weights + 3 * attention


def test_rounds_follow_from_the_plan_and_the_load() -> None:
    """Chunks of 2,048 tokens; logits of half a chunk in 1 GiB; four pages of 64 tokens a round."""
    config = MODELS["qwen3-0.6b"]
    found = work(config, largest_plan(config, 8), Load(tokens=8192, context=1024))
    assert found.rounds["chunks"] == 4
    assert found.rounds["head_chunks"] == 8
    assert found.rounds["trained_head"] == 16
    assert found.rounds["pages"] == 5  # the fourth step has 1,027 tokens before it
    assert found.attention_flops == 4 * 16 * 128 * 8192 * 512
    assert (found.adapters, found.chunk_adapters) == (8, 2)
    assert work(config, largest_plan(config, 8), Load(slots=64, adapters=3)).adapters == 3
    assert found.page_bytes == 8 * 1024 * 2 * 8 * 128 * 2  # slots, positions, 8 heads in bfloat16


@pytest.mark.parametrize("name", ["h100", "l40s"])
def test_other_gpus_are_described_with_their_own_values(name: str) -> None:
    text = GPUS[name].description
    assert f"device_memory_size: {GPUS[name].memory_bytes}" in text
    assert f"core_count: {GPUS[name].processors}" in text
    assert "NVIDIA H200" not in text


def test_a_program_above_a_ceiling_or_its_plan_is_named_with_both_figures() -> None:
    ceiling = Ceiling(kernels=10, temp_bytes=100)
    within = Forecast("train", 100, 100, Cost(kernels=10), rate=1.0, share=0.1)
    assert violations("small", within, ceiling) == []
    above = replace(within, cost=Cost(kernels=1011), temp_bytes=101, planned_bytes=99)
    assert violations("small", above, ceiling) == [
        "small train: 1,011 kernels, the limit is 10",
        "small train: 101 bytes of temporary memory, the limit is 100",
        "small train: 101 bytes of temporary memory, the limit is 99",
    ]
    wasteful = replace(within, planned_bytes=111)
    assert violations("small", wasteful, ceiling) == [
        "small train: 111 planned bytes of temporary memory, the limit is 110"
    ]


def test_decoding_may_not_copy_a_large_array() -> None:
    ceiling = Ceiling(kernels=10, temp_bytes=100)
    copying = Cost(kernels=10, copies=Counter({"f32[2048,2048] jit(run)/turn": 2**24}))
    found = Forecast("decode 8", 100, 100, copying, rate=1.0, share=0.1)
    assert violations("small", found, ceiling) == [
        "small decode 8: copies 16,777,216 bytes, f32[2048,2048] jit(run)/turn"
    ]
    assert violations("small", replace(found, program="train"), ceiling) == []
