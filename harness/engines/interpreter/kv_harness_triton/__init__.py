"""A back end of Triton named ``cpu``, by which vLLM runs model runner V2 on CPU engines: kernels are interpreted.

vLLM's CPU platform runs V2, the runner of GPU engines, where Triton has a back end of that name (0.32.0,
``triton_utils/importing.py``); no package index has such a Triton. Triton's own interpreter (``TRITON_INTERPRET=1``)
executes the same kernels with NumPy, slowly, without any back end but for the questions that vLLM asks of one.

The folder of this package is on the Python path of engines that are to run V2, and the ``dist-info`` beside it declares
the back end to Triton, which imports ``compiler`` and ``driver``.
"""
