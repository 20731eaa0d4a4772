"""A kernel like those of a communication library, to run beside ours: CTAs that only go on together."""

from __future__ import annotations

import ctypes
import time

import torch
from sm90_cases import DEVICE

from prime_kernels.jit import KernelSource, load_kernel

# Nearly all of an SM's shared memory: nothing of ours fits beside a CTA of it.
SHARED_BYTES = 200 * 1024
THREADS = 128
ELEMENTS = 1 << 16
LIMIT_SECONDS = 20.0
MAX_ROUNDS = 1 << 24  # as far as fp32 counts

CODE = r"""
struct State { int rounds, stop, expired; };

__device__ unsigned long long nanoseconds() {
    unsigned long long value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// Every round each CTA adds 1 to its part of `data` and waits for all others. Ends after `rounds`, when the
// host says so, or after `limit` nanoseconds.
extern "C" __global__ void rounds_together(float* data, unsigned n, unsigned* arrived, unsigned* last,
                                           State* state, unsigned rounds, unsigned long long limit) {
    extern __shared__ unsigned char all_of_the_sm[];
    const unsigned long long start = nanoseconds();
    __shared__ bool go_on;
    for (unsigned round = 1; round <= rounds; ++round) {
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            data[i] += 1.0f;
        __syncthreads();
        if (threadIdx.x == 0) {
            // The first CTA decides for all which round is the last, before it arrives.
            if (blockIdx.x == 0) {
                const bool expired = nanoseconds() - start > limit;
                if (expired) state->expired = 1;
                if (*(volatile int*)&state->stop or expired) *(volatile unsigned*)last = round;
                *(volatile int*)&state->rounds = round;
            }
            __threadfence_system();
            atomicAdd(arrived, 1u);
            go_on = true;
            while (*(volatile unsigned*)arrived < round * gridDim.x)
                if (nanoseconds() - start > 2 * limit) { state->expired = 1; go_on = false; break; }
            __threadfence();
            if (*(volatile unsigned*)last == round) go_on = false;
        }
        __syncthreads();
        if (not go_on) return;
    }
}
"""
SOURCE = KernelSource("test_rounds_together", CODE, "rounds_together", "sm_90a")


class State(ctypes.Structure):
    """Mirror of ``State`` above, in host memory that the kernel writes."""

    _fields_ = [("rounds", ctypes.c_int32), ("stop", ctypes.c_int32), ("expired", ctypes.c_int32)]


class Collective:
    """``ctas`` CTAs on SMs of their own, in clusters of ``cluster``, on a stream of its own.

    ``rounds``: ends by itself after so many; without, when it is told to :meth:`stop`.
    """

    def __init__(self, ctas: int, cluster: int | None = None, rounds: int | None = None) -> None:
        self._memory = torch.zeros(ctypes.sizeof(State), dtype=torch.uint8, pin_memory=True)
        self._state = State.from_address(self._memory.data_ptr())
        self._data = torch.zeros(ELEMENTS, device=DEVICE)
        self._words = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self._kernel = load_kernel(SOURCE, DEVICE)
        self._ctas, self._cluster, self._rounds = ctas, cluster, rounds
        self.stream = torch.cuda.Stream(DEVICE)
        # Once before anything runs beside it: a first launch may wait for the device.
        torch.cuda.synchronize()
        self._launch(1)
        torch.cuda.synchronize()
        self._state.rounds = 0
        self._data.zero_()
        self._words.zero_()
        torch.cuda.synchronize()

    def launch(self) -> None:
        """Returns at once."""
        self._launch(self._rounds or MAX_ROUNDS)

    def _launch(self, rounds: int) -> None:
        arguments = (
            self._data, ctypes.c_uint32(ELEMENTS), self._words[:1], self._words[1:],
            ctypes.c_uint64(self._memory.data_ptr()), ctypes.c_uint32(rounds),
            ctypes.c_uint64(int(LIMIT_SECONDS * 1e9)),
        )  # fmt: skip
        self._kernel.launch(
            self._ctas, THREADS, arguments, cluster=self._cluster, smem=SHARED_BYTES, stream=self.stream
        )

    @property
    def rounds_done(self) -> int:
        """So far."""
        return self._state.rounds

    def wait_for_rounds(self, more: int, seconds: float = 5.0) -> None:
        """Until that many more rounds are done: all its CTAs are running."""
        goal, start = self.rounds_done + more, time.monotonic()
        while self.rounds_done < goal:
            assert time.monotonic() - start < seconds, f"stands still after {self.rounds_done} rounds"

    def stop(self) -> None:
        """Let go of the SMs, and check that all CTAs did every round."""
        self._state.stop = 1
        self.finish()

    def finish(self) -> None:
        """Wait for the end and check that all CTAs did every round."""
        self.stream.synchronize()
        assert not self._state.expired
        assert self._data.unique().tolist() == [float(self.rounds_done)]
