#include "core/base/errors.h"
