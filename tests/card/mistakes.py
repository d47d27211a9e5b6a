"""Mistakes to plant, each an edit of the package (plant.py): those of order first, then others once made."""

from __future__ import annotations

from typing import NamedTuple

ORDER = "tests/gpu/test_ordering.py"
ORDERING = (ORDER,)
LOANS = ("tests/memory/test_loans.py",)
LINES = ("tests/lines/test_lanes.py", "tests/lines/test_streams.py")
CONTEXTS = ("tests/card/test_contexts.py",)
OPENS_NOTHING = ("tests/lines/test_ends.py::test_a_framework_that_is_merely_imported_is_not_opened",)
OFFLOAD = ("tests/offload/test_offload.py",)


class Mistake(NamedTuple):
    """What is wrong, the file below the package, the text to replace, by what, and the tests to notice it.

    ``needs`` is what has to be installed for that, as in ``"jax>=0.11"``, and ``card`` whether it shows on an
    emulated card alone.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ORDERING
    needs: str = ""
    card: bool = True


CUPY, TORCH, TORCH_CUDA, JAX, LANES, LOAN, RING = (
    "frameworks/cupy.py",
    "frameworks/torch.py",
    "frameworks/torch_cuda.py",
    "frameworks/jax.py",
    "lines/lanes.py",
    "frameworks/loans.py",
    "conversion/ring.py",
)
MISTAKES = (
    Mistake(
        "a staging buffer is filled again before its last copy has left",
        RING,
        "                waiting()  # for the copy that used this buffer last\n",
        "                pass\n",
    ),
    Mistake(
        "a staging buffer is emptied before it is filled",
        RING,
        "            wait()\n            part = target",
        "            part = target",
    ),
    Mistake(
        "an array is handed out before its last bytes have left locked memory",
        CUPY,
        "            cupy.cuda.get_current_stream().synchronize()\n            return result\n",
        "            return result\n",
    ),
    Mistake(
        "a copy to another card starts before its source is there",
        CUPY,
        "            stream.wait_event(ready)\n",
        "",
    ),
    Mistake(
        "the source of a copy to another card is used again before it is read",
        CUPY,
        "        reader.wait_event(copied)\n",
        "",
    ),
    Mistake(
        "an array counts as settled before it is computed",
        CUPY,
        "        with _on_card(x.device.id):\n            cupy.cuda.get_current_stream().synchronize()\n",
        "        pass\n",
    ),
    Mistake(
        "a mark is set in the default stream",
        CUPY,
        "            event.record(cupy.cuda.get_current_stream())\n",
        "            event.record(cupy.cuda.Stream.null)\n",
    ),
    Mistake(
        "nobody waits for a mark",
        CUPY,
        "                cupy.cuda.get_current_stream().wait_event(event)\n",
        "                pass\n",
    ),
    Mistake(
        "a queue does not wait for another by its handle",
        CUPY,
        "                stream.wait_event(reached)\n",
        "",
    ),
    Mistake(
        "what another thread's stream made is given back to it before it is copied",
        CUPY,
        "            copy = x.copy()\n            cupy.cuda.get_current_stream().synchronize()\n",
        "            copy = x.copy()\n",
    ),
    Mistake(
        "a function's stream does not wait for its arguments",
        CUPY,
        "        side.wait_event(outer.record())\n",
        "",
    ),
    Mistake(
        "a stream chosen with use() is lost behind a function",
        CUPY,
        "            outer.use()\n",
        "",
    ),
    Mistake(
        "the caller does not wait for a function's stream",
        CUPY,
        "            outer.wait_event(side.record())\n",
        "",
    ),
    Mistake(
        "the caller does not wait for a stream that the function has chosen",
        CUPY,
        "                outer.wait_event(last.record())\n",
        "                pass\n",
    ),
    Mistake(
        "the lender does not wait for the borrower",
        LOAN,
        "                self._lender.wait_for(self._device, self._borrower.handle(self._device))\n",
        "",
        (*ORDERING, *LOANS),
    ),
    Mistake(
        "what was lent on another queue goes back to it unread",
        LOAN,
        "                and self._lender.handle(self._device) == self._lent_on\n",
        "",
    ),
    Mistake(
        "what was lent by a lender without queues is not kept",
        LOAN,
        "                keep(self._borrowed, mark.is_done, mark.synchronize)\n",
        "                pass\n",
        LOANS,
    ),
    Mistake(
        "what is kept goes before it was read",
        LOAN,
        "                if not is_done:  # nor",
        "                if False:  # nor",
        (*LOANS, *LINES),
    ),
    Mistake(
        "nobody waits for what is kept",
        LOAN,
        "            entry[2]()\n",
        "",
        (*LOANS, *LINES),
    ),
    Mistake(
        "memory is freed while others still read what is kept",
        "memory/cleanup.py",
        "    loans.settle()  # what",
        "    # what",
        LOANS,
    ),
    Mistake(
        "a stage does not wait for what made its input",
        LANES,
        "            self.use_stream(mark.streams, mark.device)\n            mark.wait()\n",
        "            self.use_stream(mark.streams, mark.device)\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "a stage says nothing of what it made",
        "lines/line.py",
        "                    made = marks_of(result)\n",
        "                    made: list[Mark] = []\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "the caller does not wait for the last stage",
        LANES,
        "    for mark in marks:\n        mark.wait()\n    marked",
        "    marked",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "results stay on the stream of a thread that makes more of them",
        LANES,
        "        return streams.take_over(x)\n",
        "        return x\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "inputs are not held",
        "lines/line.py",
        "                    lane.hold(item)\n",
        "",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "inputs are held for the framework that owns them, and not for the one that reads",
        LANES,
        "        for reader in (owner, *registry.loaded()):\n",
        "        for reader in (owner,):\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "a thread ends before what it holds was read",
        LANES,
        '        """Wait for what is queued, before its inputs go."""\n        self._held.settle()\n',
        '        """Wait for nothing."""\n',
        LINES,
    ),
    Mistake(
        "a buffer of a pool is lent again while it is still written to",
        "memory/pools.py",
        "            owner.settle(array)\n",
        "",
    ),
    # What else was wrong once, and was found by the emulated card or by reading.
    Mistake(
        "a function's own `with` loses the stream of its lane",
        CUPY,
        "            stream.__enter__()\n",
        "            stream.use()\n",
    ),
    Mistake(
        "the source's queue does not wait for what copies from it, where it is another framework's",
        LOAN,
        "                self._lender.wait_for(self._device, self._borrower.handle(self._device))\n",
        "                pass\n",
        (f"{ORDER}::test_what_was_lent_is_read_before_its_owner_uses_it_again",),
        "torch",
    ),
    Mistake(
        "what CuPy borrows is not held",
        CUPY,
        "            return _on_loan(cupy.from_dlpack(exported), source.streams, self.queues, device)\n",
        "            return cupy.from_dlpack(exported)\n",
        (f"{ORDER}::test_what_a_framework_without_queues_lends_is_kept_until_it_was_read",),
    ),
    Mistake(
        "what torch borrows is not held",
        TORCH,
        "            return torch_cuda.on_loan(lent, source.streams, self.streams, device)\n",
        "            return lent\n",
        (f"{ORDER}::test_what_a_framework_without_queues_lends_is_kept_until_it_was_read",),
        "torch",
    ),
    Mistake(
        "torch gives memory away that another stream reads",
        TORCH_CUDA,
        "            x.record_stream(torch.cuda.current_stream(x.device))\n",
        "            pass\n",
        needs="torch",
    ),
    Mistake(
        "what JAX borrows is not held",
        JAX,
        "            _lend_to_jax(x, lent, jax_device(device))\n",
        "            pass\n",
        LOANS,
        "jax",
        card=False,
    ),
    Mistake(
        "what JAX borrows is held for as long as its array lives, and no longer",
        JAX,
        "    loans.keep_after(lent, x, reached.is_done, reached.wait)\n",
        "",
        LOANS,
        "jax",
        card=False,
    ),
    Mistake(
        "what TensorFlow borrows is not held",
        "frameworks/tensorflow.py",
        "            _lend_to_tensorflow(x, lent, device)\n",
        "            pass\n",
        LOANS,
        "tensorflow",
        card=False,
    ),
    Mistake(
        "JAX borrows from a card that is not the current one of its owner",
        JAX,
        "        with source.selected(device), _x64(True):\n",
        "        with _x64(True):\n",
        LOANS,
        "jax",
        card=False,
    ),
    Mistake(
        "items whose framework has no queues are not held",
        LANES,
        '(device := owner.device_of(x)).kind == "cpu":\n',
        '(device := owner.device_of(x)).kind == "cpu" or owner.streams is None:\n',
        LINES,
        card=False,
    ),
    Mistake(
        "an array without axes gets one in CuPy",
        CUPY,
        '            result.set(np.asarray(view, dtype=result.dtype, order="C"))\n',
        "            result.set(np.ascontiguousarray(view, dtype=result.dtype))\n",
        ("tests/gpu/test_conversion.py",),
    ),
    Mistake(
        "JAX's own copy is taken for a view",
        JAX,
        "            return asarray(memoryview(x))\n",
        "            array: np.ndarray = asarray(x)\n"
        "            if array.flags.owndata:\n"
        "                raise Fallback\n"
        "            return array\n",
        ("tests/test_matrix.py", "tests/conversion"),
        "jax>=0.11",
        card=False,
    ),
    Mistake(
        "a JAX array of another order of axes is planned for as if it lay in order",
        JAX,
        "                memoryview(x)  # refused",
        "                pass  # refused",
        ("tests/conversion/test_plans.py",),
        "jax>=0.11",
        card=False,
    ),
    Mistake(
        "work on the host opens JAX, which is merely imported",
        "lines/on_device.py",
        "device in open_devices(framework):\n",
        "device in framework.devices():\n",
        OPENS_NOTHING,
        "jax",
        card=False,
    ),
    Mistake(
        "gpu_context opens JAX, which is merely imported",
        "memory/cleanup.py",
        "one.accelerator(index) in open_devices(one)]\n",
        "one.accelerator(index) in one.devices()]\n",
        OPENS_NOTHING,
        "jax",
        card=False,
    ),
    Mistake(
        "devices() opens JAX",
        "devices/discovery.py",
        "        for device in visible_devices(one):\n            found.setdefault",
        "        for device in one.devices():\n            found.setdefault",
        OPENS_NOTHING,
        "jax",
        card=False,
    ),
    Mistake(
        "a question about cards opens JAX",
        "devices/discovery.py",
        'any(device.kind == "gpu" for one in loaded() for device in visible_devices(one))\n',
        'any(device.kind == "gpu" for one in loaded() for device in one.devices())\n',
        OPENS_NOTHING,
        "jax",
        card=False,
    ),
    Mistake(
        "CuPy borrows from a card without selecting it, and opens the current one",
        CUPY,
        "        with source.selected(device), _on_card(device.index):\n",
        "        if True:\n",
        CONTEXTS,
        "torch",
    ),
    Mistake(
        "a CUDA array interface is brought to the current card",
        CUPY,
        '            with _on_card(_card_at(x.__cuda_array_interface__["data"][0])):\n',
        "            if True:\n",
        (f"{ORDER}::test_foreign_arrays_stay_on_the_card_where_they_are",),
    ),
    Mistake(
        "an array of another library by DLPack has the current card opened, too",
        CUPY,
        "            with _on_card(int(x.__dlpack_device__()[1])):\n",
        "            if True:\n",
        CONTEXTS,
    ),
    Mistake(
        "torch looks for a CUDA array interface on its current card",
        TORCH_CUDA,
        'torch.as_tensor(_Interface({**interface, "version": 2}, x))\n',
        'torch.as_tensor(_Interface({**interface, "version": 2}, x), device="cuda")\n',
        (f"{ORDER}::test_foreign_arrays_stay_on_the_card_where_they_are",),
        "torch",
    ),
    Mistake(
        "torch borrows on the current card, and not on that of CuPy's array",
        TORCH,
        "        with source.selected(device), torch.cuda.device(device.index):\n",
        "        if True:\n",
        (f"{ORDER}::test_what_is_lent_on_a_card_that_is_not_the_current_one",),
        "torch",
    ),
    Mistake(
        "a copy is made on the current card, and not on the array's",
        CUPY,
        "        with _on_card(x.device.id):\n            return x.copy()\n",
        "        return x.copy()\n",
        (*ORDERING, *CONTEXTS),
    ),
    Mistake(
        "torch takes a CUDA array interface without its stream",
        TORCH_CUDA,
        "        _wait_for(tensor.device.index, handle)\n",
        "        pass\n",
        (f"{ORDER}::test_foreign_arrays_enter_torch_in_order_and_also_when_they_are_read_only",),
        "torch",
    ),
    Mistake(
        "torch refuses a CUDA array interface that is read-only",
        TORCH_CUDA,
        '    interface["data"] = (address, False)\n',
        "",
        (f"{ORDER}::test_foreign_arrays_enter_torch_in_order_and_also_when_they_are_read_only",),
        "torch",
    ),
    Mistake(
        "torch may write to a CUDA array interface that is read-only",
        TORCH_CUDA,
        "    return tensor.clone() if is_read_only else tensor\n",
        "    return tensor\n",
        (f"{ORDER}::test_foreign_arrays_enter_torch_in_order_and_also_when_they_are_read_only",),
        "torch",
    ),
    Mistake(
        "torch's pinned cache is given back by the call of later releases alone",
        TORCH_CUDA,
        '    return public or getattr(torch._C, "_host_emptyCache", None)\n',
        "    return public\n",
        ("tests/gpu/test_memory.py::test_the_pinned_cache_of_torch_is_given_back_and_counted",),
        "torch<2.12",
    ),
    Mistake(
        "to find the card with the most free memory opens them all",
        CUPY,
        "        known = None if cupy.cuda.runtime.is_hip else cards.free_memory(device.index)\n",
        "        known = None\n",
        CONTEXTS,
    ),
    Mistake(
        "on leaving a card the one before is opened",
        CUPY,
        "    driver = None if runtime.is_hip or _has_context(before) else cards.driver()\n",
        "    driver = None\n",
        CONTEXTS,
    ),
    Mistake(
        "asking for the cards wakes the driver, and children that are forked have none",
        "frameworks/cards.py",
        "    if not is_awake() and sys.executable",
        "    if False and sys.executable",
        CONTEXTS,
    ),
    Mistake(
        "asking CuPy for its cards wakes the driver",
        CUPY,
        '        return tuple(Device("gpu", card.index) for card in cards.cards())\n',
        "        return None\n",
        CONTEXTS,
    ),
    Mistake(
        "streams end with their threads, and leave what they have cached behind",
        CUPY,
        "            self._idle.append(stream)\n",
        "            pass\n",
        CONTEXTS,
    ),
    Mistake(
        "JAX's cache counts twice as free memory",
        "frameworks/jax_devices.py",
        "    counts_cache_as_free = True",
        "    counts_cache_as_free = False",
        OFFLOAD,
        "jax",
        card=False,
    ),
    Mistake(
        "what others have taken of a card counts as free for JAX",
        "frameworks/jax_devices.py",
        "        return free if on_card is None else min(free, on_card",
        "        return free if True else min(free, on_card",
        OFFLOAD,
        "jax",
        card=False,
    ),
    Mistake(
        "a test's largest uint64 overflows",
        "../tests/gpu/test_conversion.py",
        "        below = (numbers % 100).astype(dtype)\n"
        "        return (np.full(count, np.iinfo(dtype).max, dtype) - below).reshape(shape)\n",
        "        return (np.iinfo(dtype).max - numbers % 100).astype(dtype).reshape(shape)\n",
        ("tests/gpu/test_conversion.py",),
    ),
    Mistake(
        "a test's array without axes is a scalar",
        "../tests/gpu/test_conversion.py",
        "lambda: np.array(base[1, 1]),\n",
        "lambda: base[1, 1].reshape(()),\n",
        ("tests/gpu/test_conversion.py",),
    ),
    Mistake(
        "a test asks for the memory of a card that nobody has opened",
        "../tests/gpu/test_memory.py",
        "    arraybridge.convert_memory(np.zeros(1, np.uint8), name, 0)\n",
        "",
        ("tests/gpu/test_memory.py::test_real_failures_are_recognised",),
    ),
    Mistake(
        "a machine with a card is set up without NVML",
        "../tox.ini",
        "extras = cupy-cuda13x, torch, test, nvml\n",
        "extras = cupy-cuda13x, torch, test\n",
        ("tests/test_card_tool.py",),
        card=False,
    ),
)
