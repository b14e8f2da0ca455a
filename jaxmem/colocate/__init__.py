"""Several small runs on one machine: in one program (`vmapped`), on parts of the devices (`parts`), how many fit (`fitting`), and which
way suits a mix of runs (`packing`, which knows no jax).

A. Robroek, E. Yousefzadeh-Asl-Miandoab, P. Tozun, "An Analysis of Collocation on GPUs for Deep Learning Training" (arXiv 2209.06018).
"""
