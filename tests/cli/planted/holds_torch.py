"""Imports torch, holds 64 MiB, and waits until its input ends."""

import sys

import torch

held = torch.ones(16 << 20)
print("ready", flush=True)
sys.stdin.read()
