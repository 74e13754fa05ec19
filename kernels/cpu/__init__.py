"""Bodies in C++ (`_kernels`, built by CMake). Importable only where the extension was built."""
