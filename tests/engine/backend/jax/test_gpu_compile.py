"""The tool that compiles for an absent GPU takes every program and reports every refusal. The tests
run without its compiler.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.gpu_compile import __main__ as gpu_compile
from scripts.gpu_compile import ceilings, norms
from scripts.gpu_compile.programs import Task
from scripts.gpu_compile.shapes import GROUPS, HEAD_DIMS, MODELS

ROOT = Path(__file__).parents[4]


def lowered(text: str) -> None:
    raise AssertionError(f"{text} is not to be lowered here")


def listed(*options: str) -> list[str]:
    """Runs in its own process: shapes in place of arrays do not pass the type checks of tests."""
    command = [sys.executable, "-m", "scripts.gpu_compile", "--list", *options]
    return subprocess.check_output(command, cwd=ROOT, text=True, timeout=200).splitlines()


@pytest.fixture(scope="module")
def usual() -> list[str]:
    return listed()


def test_the_attention_of_every_named_model_is_also_compiled_alone() -> None:
    for config in MODELS.values():
        assert config.head_dim in HEAD_DIMS
        assert config.heads // config.kv_heads in GROUPS


def kernels(dtype: str, groups: Iterable[int]) -> set[str]:
    return {
        f"attention {dtype} head_dim {head_dim} group {group} {kernel}"
        for head_dim in HEAD_DIMS
        for group in groups
        for kernel in ("forward", "queries", "keys")
    }


def by_model(names: list[str]) -> dict[str, set[str]]:
    """Return the names of each model's programs, without the model."""
    programs: dict[str, set[str]] = {}
    for name in names:
        model, _, program = name.partition(" ")
        programs.setdefault(model, set()).add(program)
    del programs["attention"]
    return programs


def attention(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("attention")}


def test_kernels_of_every_head_dim_are_compiled_for_the_ends_of_the_groups(
    usual: list[str],
) -> None:
    first, last = GROUPS[0], GROUPS[-1]
    assert attention(usual) == kernels("bfloat16", (first, last)) | kernels("float32", (last,))


def test_two_models_are_compiled_each_with_the_programs_of_one_rank_bucket(
    usual: list[str],
) -> None:
    """``ceilings`` compiles the rest of the second."""
    of_model = by_model(usual)
    assert set(of_model) == {"qwen3-0.6b", "qwen3-8b"}
    small, large = of_model["qwen3-0.6b"], of_model["qwen3-8b"]
    assert {"decode 128", "train_micro_batch (128, 64, 128)", "step_osft_core 128"} <= small
    assert not any(name.endswith((" 8", " 32", "(128, 1, 128)")) for name in small)
    assert {"score_micro_batch (8, 1, 128)", "prefill 8", "copy ()"} <= large
    elsewhere = {program for model, program in ceilings.CEILINGS if model == "qwen3-8b"}
    assert elsewhere == {"train_micro_batch", "decode"}
    assert not any(name.startswith(tuple(elsewhere)) for name in large)


def test_a_run_without_ceilings_leaves_nothing_out() -> None:
    names = listed("--device", "h100")
    assert attention(names) == (
        kernels("bfloat16", GROUPS) | kernels("float32", (GROUPS[0], GROUPS[-1]))
    )
    of_model = by_model(names)
    assert {f"decode {rank}" for rank in (8, 32, 128)} <= of_model["qwen3-0.6b"]
    assert {"train_micro_batch (8, 1, 128)", "decode 8"} <= of_model["qwen3-8b"]


def test_every_kernel_and_model_is_compiled_on_request() -> None:
    every = listed("--full")
    assert len(set(every)) == len(every)
    assert attention(every) == kernels("bfloat16", GROUPS) | kernels("float32", GROUPS)
    of_model = by_model(every)
    assert set(of_model) == set(MODELS)
    for programs in of_model.values():
        assert programs == of_model["qwen3-0.6b"]
        assert {f"decode {rank}" for rank in (8, 32, 128)} <= programs


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # it may install the compiler first
@pytest.mark.parametrize(
    "options",
    [
        "--full",
        "--device h100",
        "--device l40s --no-kernels",
        "--device l40s --only 'attention bfloat16'",
    ],
)
def test_gpus_take_every_program(options: str) -> None:
    """An L40S does not take the float32 attention kernels of head_dim 128: see docs/gpu.md."""
    subprocess.run(["make", "gpu-compile", f"ARGS={options}"], cwd=ROOT, check=True)


def test_a_refused_program_is_named_and_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [Task("good", lowered), Task("greedy", lowered), Task("small", lowered)]

    def compile_one(task: Task) -> int:
        if task.name == "greedy":
            raise RuntimeError("Shared memory size limit exceeded\nand a page more")
        return 2048

    status = gpu_compile.report(gpu_compile.compiled(tasks, compile_one, threads=2), "H200")
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert re.fullmatch(r"good  ok  \d\.\d s  2,048 bytes", lines[0])
    assert re.fullmatch(
        r"greedy  error  \d\.\d s  RuntimeError: Shared memory size limit exceeded", lines[1]
    )
    assert lines[2].startswith("small  ok")
    assert lines[3].endswith("1 refused: greedy")


def test_a_run_without_refusals_passes_and_an_empty_one_fails() -> None:
    results = gpu_compile.compiled([Task("good", lowered)], lambda task: 0, threads=1)
    assert gpu_compile.report(results, "H200") == 0
    assert gpu_compile.report([], "H200") == 1


def module(*, tiles: str, root: str = "jvp()") -> str:
    """An optimised module with a norm in one kernel, and a kernel of another kind."""
    return f"""
%sum (a: f32[], b: f32[]) -> f32[] {{
  ROOT %add.{len(root)} = f32[] add(%a, %b)
}}

%fused.1 (x: f32[2,8]) -> f32[2,8] {{
  %x.{tiles} = f32[2,8] parameter(0)
  %sums = f32[2] reduce(%x.{tiles}, %zero), dimensions={{1}}, to_apply=%sum
  %root = f32[2] rsqrt(%sums), metadata={{op_name="jit(run)/{root}/rsqrt"}}
  ROOT %out = f32[2,8] multiply(%x.{tiles}, %root)
}}

%fused.2 (x: f32[2,8]) -> f32[2,8] {{
  ROOT %y = f32[2,8] negate(%x)
}}

ENTRY %main (x: f32[2,8]) -> f32[2,8] {{
  %n = f32[2,8] fusion(%x), kind=kCustom, calls=%fused.1, backend_config={{"tiles":"{tiles}"}}
  ROOT %o = f32[2,8] fusion(%n), kind=kLoop, calls=%fused.2
}}
"""


def test_a_norm_is_known_by_its_operations_and_tiles() -> None:
    (norm,) = norms.norms(module(tiles="4"))
    assert norm.tiles == '{"tiles":"4"}'
    assert "reduce" in norm.operations and "jit(run)" not in norm.operations
    assert norms.norms(module(tiles="4", root="jvp()/other")) == {norm}
    assert norms.norms(module(tiles="8")).isdisjoint({norm})


def test_roots_of_the_backward_pass_are_not_compared() -> None:
    for root in ("transpose(jvp())", "checkpoint/rematted_computation"):
        assert norms.norms(module(tiles="4", root=root)) == set()


def test_a_root_without_its_sum_is_not_an_equal_norm() -> None:
    norm, root = norms.Kernel("%1 reduce(%0) rsqrt(%1)", ""), norms.Kernel("rsqrt(%0)", "")
    assert norms.compared("none", {norm, root}, {norm, root}) == norms.Comparison("none", 1, 2)
    assert norms.compared("none", {norm}, {root}) == norms.Comparison("none", 0, 1)


def apart(*, tiles: str) -> str:
    """A module with the sum of a norm in one kernel, and its root in another."""
    return f"""
%fused.1 (x: f32[2,8]) -> f32[2] {{
  %x.{tiles} = f32[2,8] parameter(0)
  ROOT %sums = f32[2] reduce(%x.{tiles}, %zero), dimensions={{1}}, to_apply=%sum
}}

%fused.2 (sums: f32[2]) -> f32[2] {{
  %sums.1 = f32[2] parameter(0)
  ROOT %root = f32[2] rsqrt(%sums.1), metadata={{op_name="jit(run)/rsqrt"}}
}}

ENTRY %main (x: f32[2,8]) -> f32[2] {{
  %s = f32[2] fusion(%x), kind=kCustom, calls=%fused.1, backend_config={{"tiles":"{tiles}"}}
  ROOT %r = f32[2] fusion(%s), kind=kLoop, calls=%fused.2, backend_config={{"tiles":"1"}}
}}
"""


def test_a_norm_in_two_kernels_is_known_by_both() -> None:
    (norm,) = norms.norms(apart(tiles="4"))
    assert "reduce" in norm.operations and "rsqrt" in norm.operations
    assert norms.norms(apart(tiles="4")) == {norm}
    assert norms.norms(apart(tiles="8")).isdisjoint({norm})


@pytest.mark.nightly
@pytest.mark.timeout(900)  # it may install the compiler first
def test_the_norms_of_scoring_and_training_are_the_same_kernels() -> None:
    command = ["make", "gpu-compile", "ARGS=--norms"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert sum(": 4 of 4 kernels" in line for line in lines) == 8


def test_norms_that_are_other_kernels_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    equal, other = norms.Comparison("dots", 4, 4), norms.Comparison("none", 1, 4)
    assert norms.report([equal]) == 0
    assert norms.report([equal, other]) == 1
    assert norms.report([]) == norms.report([norms.Comparison("dots", 0, 0)]) == 1
    assert "none: 1 of 4 kernels of norms" in capsys.readouterr().out


def test_ci_compiles_for_a_gpu() -> None:
    assert re.search(r"^make .*\bgpu-compile\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
