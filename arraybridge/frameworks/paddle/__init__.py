"""PaddlePaddle: tensors on the CPU and on CUDA GPUs."""
