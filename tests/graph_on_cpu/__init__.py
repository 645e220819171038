"""Executes the graphs that were compiled for an Ascend cluster on the ranks of a CPU machine, to check a layout.

:mod:`mindrlhf.dryrun.compile` writes the graph of each rank as a MindIR file. Here it is read (``mindir``), its
functions are merged into one graph (``inline``), what only Ascend can do is rewritten for the CPU (``lower``, with
``collectives``, ``kernels``, ``expert_kernels`` and ``routing``), and ranks that ``msrun`` starts train with it
(``run`` starts them, ``rank`` is their program, ``model`` gives the product's worker its graphs). What comes out are
numbers to compare with those of one process: losses, log-probabilities, weights, published tensors.
"""
