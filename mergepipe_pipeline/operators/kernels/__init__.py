"""All compiled code of the operators: loops over NumPy arrays, which know no task and no plan.

Only what computes imports these modules, because they load the compiler; `splitmix` loads none.
"""
