"""Matrices in device memory, and their products: one module a form.

A *form* (`form.Form`) says how some rows of a matrix are uploaded, what memory they take, and
which launches multiply or gather them. `kinds.KINDS` are asked in order which form a checkpoint's
part gets. Parts of one matrix may get different forms (Q4_K_M has finer values than queries), so a
matrix is a list of *segments*, each writing its own columns of the product.
"""
