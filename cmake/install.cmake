# cmake --install and the package that find_package(megamoe) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(megamoe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/megamoe)

set(megamoe_libraries megamoe)
if(MEGAMOE_CUDA)
  list(APPEND megamoe_libraries megamoe_cuda_backend megamoe_overlap megamoe_exchange megamoe_cuda)
endif()
install(TARGETS ${megamoe_libraries} EXPORT megamoe_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/megamoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT megamoe_targets NAMESPACE megamoe:: DESTINATION ${megamoe_package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(MEGAMOE_BUILD_TOOLS)
  install(TARGETS megamoe_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/megamoe-config.cmake.in
  ${PROJECT_BINARY_DIR}/megamoe-config.cmake INSTALL_DESTINATION ${megamoe_package_dir})
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/megamoe-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/megamoe-config.cmake
              ${PROJECT_BINARY_DIR}/megamoe-config-version.cmake
        DESTINATION ${megamoe_package_dir})
