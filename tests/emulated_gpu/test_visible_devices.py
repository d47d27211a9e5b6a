"""CUDA_VISIBLE_DEVICES on the emulated GPUs: CUDA, NVML and arraybridge agree on the number of each GPU."""

from __future__ import annotations

import pytest

from tests.helpers import output_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_two_gpus")]

UUID = "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedee"
#: The variable → the physical numbers of the GPUs that CUDA shows, in its order.
VISIBLE: dict[str, list[int]] = {
    "0": [0],
    "1": [1],
    "0,1": [0, 1],
    "1,0": [1, 0],
    f"{UUID}01": [1],
    f"1, {UUID}00": [1, 0],
    "1,7,0": [1],
    "0,0": [],
    "GPU-": [],  # ambiguous: a prefix of both UUIDs
    "-1": [],
    "7": [],
}
PROGRAM = (
    "import arraybridge as ab, cupy, numpy as np, pynvml",
    "from arraybridge import hardware",
    "from tests.emulated_gpu import accounting",
    "runtime = cupy.cuda.runtime",
)


@pytest.mark.parametrize("variable", VISIBLE)
def test_all_interfaces_number_gpus_equally(variable: str) -> None:
    printed = output_of(
        *PROGRAM,
        "listed = [gpu.pci for gpu in hardware.gpus()]",
        "print([str(device) for device in ab.devices('cupy')], accounting.is_driver_initialized())",
        "try: count = runtime.getDeviceCount()",
        "except runtime.CUDARuntimeError as error: count = 0; print(error)",
        "else: print('')",
        "print([int(pci[5:7], 16) - 16 for pci in listed])",
        "print([int(runtime.deviceGetPCIBusId(i)[5:7], 16) - 16 for i in range(count)])",
        "pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())",
        env={"CUDA_VISIBLE_DEVICES": variable},
    )
    expected = VISIBLE[variable]
    assert printed.splitlines() == [
        f"{[f'gpu:{i}' for i in range(len(expected))]} False",
        "" if expected else "cudaErrorNoDevice: no CUDA-capable device is detected",
        str(expected),
        str(expected),
        "2",  # NVML lists every GPU
    ]


def test_memory_is_counted_on_the_physical_gpu() -> None:
    printed = output_of(
        *PROGRAM,
        "x = ab.convert_memory(np.ones(1 << 20, np.uint8), 'cupy', 0)",
        "pynvml.nvmlInit()",
        "handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]",
        "print([pynvml.nvmlDeviceGetMemoryInfo(handle).used >= x.nbytes for handle in handles])",
        "print([len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles])",
        "reading = hardware.read_gpu(hardware.gpus()[0])",
        "print(reading.used >= x.nbytes, hardware.free_memory(0) == reading.free, hardware.free_memory(1))",
        "print(ab.memory_stats()['gpu:0'].holdings[0].used, ab.to_numpy(x).sum())",
        env={"CUDA_VISIBLE_DEVICES": "1"},
    )
    assert printed.splitlines() == ["[False, True]", "[0, 1]", "True True None", "1048576 1048576"]


def test_a_hidden_gpu_is_missing() -> None:
    printed = output_of(
        *PROGRAM,
        "try: ab.convert_memory(np.ones(3), 'cupy', 1)",
        "except ab.DeviceNotFoundError as error: print(error)",
        env={"CUDA_VISIBLE_DEVICES": "1"},
    )
    problem = "cupy has no device gpu:1 here; it has gpu:0."
    assert printed == f'{problem} Pass one of these, such as device="gpu:0".'


def test_an_empty_variable_hides_every_gpu() -> None:
    printed = output_of(
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''",
        *PROGRAM,
        "print(hardware.gpus(), ab.devices('cupy'), ab.least_used_gpu())",
    )
    assert printed == "() [] None"


def test_driver_stays_uninitialized_without_visible_gpus() -> None:
    printed = output_of(
        *PROGRAM,
        "print(ab.gpu_available(), ab.devices('cupy'))",
        "print(ab.framework('cupy').devices.missing_device_reason())",
        "print(accounting.is_driver_initialized())",
        env={"CUDA_VISIBLE_DEVICES": "-1"},
    )
    reason = "CUDA reports cudaErrorNoDevice: no CUDA-capable device is detected"
    assert printed.splitlines() == [
        "False []",
        f"{reason}. CuPy needs an NVIDIA GPU and its driver.",
        "False",
    ]


@pytest.mark.parametrize(("at_start", "later"), [(None, "1"), ("1,0", "0"), ("0", "1,0"), (None, "")])
def test_numbers_stay_if_the_variable_changes_later(at_start: str | None, later: str) -> None:
    printed = output_of(
        *PROGRAM,
        "import os",
        "numbers = lambda: [int(gpu.pci[5:7], 16) - 16 for gpu in hardware.gpus()]",
        "runtime.getDeviceCount()",
        "before = numbers(), [str(device) for device in ab.devices('cupy')]",
        f"os.environ['CUDA_VISIBLE_DEVICES'] = {later!r}",
        "print((numbers(), [str(device) for device in ab.devices('cupy')]) == before, numbers())",
        "x = cupy.empty(1 << 20)",  # GPU 0 is fuller from here on
        "last = runtime.getDeviceCount() - 1",
        "print(ab.device_of(ab.convert_memory(np.ones(3), 'cupy', 'auto')) == f'gpu:{last}')",
        "print(ab.least_used_gpu() == last, hardware.free_memory(0) < hardware.gpus()[0].total)",
        env={} if at_start is None else {"CUDA_VISIBLE_DEVICES": at_start},
    )
    order = [0, 1] if at_start is None else [int(number) for number in at_start.split(",")]
    assert printed.splitlines() == [f"True {order}", "True", "True True"]
