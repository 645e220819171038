/* The part of vllm_ascend_C that its sleep mode is made of, over cann.c: an allocator whose blocks are physical pages
 * behind virtual addresses, and which Python can take the pages from and give to again
 * (vllm_ascend/device_allocator/camem.py is the other side). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { PAGE = 2 << 20 };
typedef unsigned long long Word;

extern int aclrtReserveMemAddress(void **, size_t, size_t, void *, uint64_t);
extern int aclrtMallocPhysical(void **, size_t, const void *, uint64_t);
extern int aclrtMapMem(void *, size_t, size_t, void *, uint64_t);
extern int aclrtUnmapMem(void *);
extern int aclrtFreePhysical(void *);

static PyObject *on_malloc, *on_free;

static int fill(Word address, Word size, Word slot) {
    void **handle = (void **)slot;
    int error = aclrtMallocPhysical(handle, size, NULL, 0);
    return error ? error : aclrtMapMem((void *)address, size, 0, *handle, 0);
}
static void empty(Word address, Word slot) {
    aclrtUnmapMem((void *)address);
    aclrtFreePhysical(*(void **)slot);
}

void *my_malloc(ssize_t wanted, int device, void *stream) {
    size_t size = (wanted + PAGE - 1) / PAGE * PAGE;
    void *address = NULL, **slot = malloc(sizeof *slot);
    if (aclrtReserveMemAddress(&address, size, 0, NULL, 0) || fill((Word)address, size, (Word)slot)) return NULL;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *done = PyObject_CallFunction(on_malloc, "((KKKK))", (Word)device, (Word)size, (Word)address, (Word)slot);
    if (!done) PyErr_Print();
    Py_XDECREF(done);
    PyGILState_Release(state);
    return address;
}

void my_free(void *memory, ssize_t wanted, int device, void *stream) {
    PyGILState_STATE state = PyGILState_Ensure();
    Word of, size, address, slot;
    PyObject *handle = PyObject_CallFunction(on_free, "K", (Word)memory);
    if (handle && PyArg_ParseTuple(handle, "KKKK", &of, &size, &address, &slot)) empty(address, slot);
    else PyErr_Print();
    Py_XDECREF(handle);
    PyGILState_Release(state);
}

static PyObject *init_module(PyObject *self, PyObject *arguments) {
    if (!PyArg_ParseTuple(arguments, "OO", &on_malloc, &on_free)) return NULL;
    Py_INCREF(on_malloc);
    Py_INCREF(on_free);
    Py_RETURN_NONE;
}
static PyObject *create_and_map(PyObject *self, PyObject *arguments) {
    Word device, size, address, slot;
    if (!PyArg_ParseTuple(arguments, "KKKK", &device, &size, &address, &slot)) return NULL;
    if (fill(address, size, slot)) return PyErr_Format(PyExc_RuntimeError, "the fake NPU has no %llu bytes left", size);
    Py_RETURN_NONE;
}
static PyObject *unmap_and_release(PyObject *self, PyObject *arguments) {
    Word device, size, address, slot;
    if (!PyArg_ParseTuple(arguments, "KKKK", &device, &size, &address, &slot)) return NULL;
    empty(address, slot);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"init_module", init_module, METH_VARARGS, NULL},
    {"python_create_and_map", create_and_map, METH_VARARGS, NULL},
    {"python_unmap_and_release", unmap_and_release, METH_VARARGS, NULL},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "vllm_ascend_C", NULL, -1, methods};
PyMODINIT_FUNC PyInit_vllm_ascend_C(void) { return PyModule_Create(&definition); }
