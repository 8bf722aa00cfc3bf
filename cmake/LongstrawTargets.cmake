# One library a folder, one test program a test file.
#
#   longstraw_library(NAME SOURCES a.cpp b.cpp LINK other fmt::fmt [TORCH])
#   longstraw_program(NAME SOURCES main.cpp LINK lib [TORCH])
#   longstraw_test(NAME SOURCES a_test.cpp LINK lib LABELS unit [TORCH])
# TORCH links LibTorch and reuses the precompiled torch header.

add_library(longstraw_options INTERFACE)
target_include_directories(longstraw_options INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(longstraw_options INTERFACE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers
                       -ffp-contract=off)

function(_longstraw_common target torch)
  target_link_libraries(${target} PUBLIC longstraw_options)
  if(torch)
    target_link_libraries(${target} PUBLIC longstraw::torch)
    target_precompile_headers(${target} REUSE_FROM longstraw_torch_pch)
  endif()
endfunction()

function(longstraw_library name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_LINK})
  _longstraw_common(${name} ${ARG_TORCH})
endfunction()

function(longstraw_program name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  # As the libraries are compiled, not -fPIE: otherwise the precompiled header does not fit.
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIC)
  target_link_libraries(${name} PRIVATE ${ARG_LINK})
  _longstraw_common(${name} ${ARG_TORCH})
endfunction()

function(longstraw_test name)
  cmake_parse_arguments(ARG "TORCH" "TIMEOUT" "SOURCES;LINK;LABELS" ${ARGN})
  longstraw_program(${name} SOURCES ${ARG_SOURCES} LINK ${ARG_LINK} GTest::gtest_main GTest::gmock
                    $<$<BOOL:${ARG_TORCH}>:longstraw::torch>)
  if(ARG_TORCH)
    target_link_libraries(${name} PRIVATE longstraw::torch)
    target_precompile_headers(${name} REUSE_FROM longstraw_torch_pch)
  endif()
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                       ENVIRONMENT "RC_PARAMS=seed=20260714")
endfunction()

# Fails at configure time if `target` links `forbidden` directly or through others: the comparator must not be able
# to share a kernel's bug.
function(longstraw_assert_unreachable target forbidden)
  set(queue ${target})
  set(seen "")
  while(queue)
    list(POP_FRONT queue item)
    if(item IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${item})
    if(item MATCHES "${forbidden}")
      message(FATAL_ERROR "${target} must not reach ${forbidden}, but links ${item}")
    endif()
    if(TARGET ${item})
      foreach(property LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
        get_target_property(more ${item} ${property})
        if(more)
          list(APPEND queue ${more})
        endif()
      endforeach()
    endif()
  endwhile()
endfunction()
