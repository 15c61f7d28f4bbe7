"""The libraries that a GPU needs: TensorRT, CUDA, and tensors shared by DLPack."""
