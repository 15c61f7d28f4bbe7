"""The libraries that engines need: TensorRT, the CUDA runtime and driver, and DLPack."""
