"""The machine that runs compiled kernels: it computes what the instructions say, and it notices what a program must not do."""

import numpy as np
import pytest
import torch

from tests.compiled import ptx
from tests.compiled.machine import Machine
from tests.compiled.memory import Global
from tests.compiled.ptx import Fault, Program

HEAD = ".visible .entry k(.param .u64 k_param_0)\n.reqntid 64\n{\n"
# Thread t keeps its number in shared memory and takes that of thread 63 - t; then it goes to place t of the output.
EXCHANGE = """
    ld.param.b64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    BARRIER
    sub.s32 %r5, 63, %r1;
    mad.lo.s32 %r6, %r5, 4, %r2;
    ld.shared.b32 %r7, [%r6];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3+OFFSET], %r7;
    ret;
}
"""


def run(body: str, out: np.ndarray, shared: int = 256) -> Machine:
    machine = Machine(Program(HEAD + body), [4096], Global([(4096, out.view(np.uint8), "out")]), shared)
    machine.run((0, 0, 0))
    return machine


def test_threads_exchange_numbers_across_a_barrier():
    out = np.zeros(64, np.uint32)
    machine = run(EXCHANGE.replace("BARRIER", "bar.sync 0;").replace("OFFSET", "0"), out)
    assert not machine.notes and (out == np.arange(64)[::-1]).all()


def test_a_missing_barrier_is_a_race():
    machine = run(EXCHANGE.replace("BARRIER", "").replace("OFFSET", "0"), np.zeros(64, np.uint32))
    assert {kind for kind, *_ in machine.notes} == {"race"}


@pytest.mark.parametrize(("change", "message"), [
    (("OFFSET", "4"), "byte 256 of out, which has 256"),
    (("OFFSET", "2"), "misaligned access to global"),
    (("shl.b32 %r3, %r1, 2", "shl.b32 %r3, %r1, 3"), "shared bytes 0 to 508 of 256"),
    (("sub.s32 %r5", "frob.s32 %r5"), "unknown instruction frob.s32"),
    (("BARRIER", "setp.lt.u32 %p1, %r1, 5;\n @%p1 bra $L1;\n $L1:"), "part ways"),
])
def test_what_a_program_must_not_do_stops_it(change, message):
    body = EXCHANGE.replace(*change).replace("BARRIER", "bar.sync 0;").replace("OFFSET", "0")
    with pytest.raises(Fault, match=message):
        run(body, np.zeros(64, np.uint32))


def test_shared_memory_that_nobody_wrote_is_noticed():
    body = EXCHANGE.replace("st.shared.b32 [%r4], %r1;", "").replace("BARRIER", "bar.sync 0;").replace("OFFSET", "0")
    assert {kind for kind, *_ in run(body, np.zeros(64, np.uint32)).notes} == {"uninitialised"}


def test_one_place_written_twice_by_one_instruction_is_a_race():
    body = EXCHANGE.replace("shl.b32 %r3, %r1, 2", "and.b32 %r3, %r1, 60").replace("BARRIER", "bar.sync 0;").replace("OFFSET", "0")
    assert "one instruction writes different values to one place" in {what for _, what, _ in run(body, np.zeros(64, np.uint32)).notes}


def test_bfloat16_rounds_as_torch_does():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-30, 30, 1000)
    x = torch.cat([x, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-8])])
    found = torch.from_numpy(ptx.from_bfloat16(ptx.to_bfloat16(x.numpy())).copy())
    assert torch.equal(found.nan_to_num(7), x.bfloat16().float().nan_to_num(7))


def test_tf32_keeps_ten_bits():
    x = np.float32([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -3.0, np.inf])
    assert ptx.to_tf32(x).tolist() == [1 + 2**-10, 1 + 2**-10, 1.0, -3.0, np.inf]
