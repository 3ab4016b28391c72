/* Makes mori_ops._C importable under the limited API. Importing it runs the static initialisers that register torch.ops.mori.*. */
#include <Python.h>

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&definition); }
