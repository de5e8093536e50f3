// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// Grafana's server puts this into the page. @grafana/runtime reads it while it is loaded, so this module comes first.

const boot = {
  settings: {
    appSubUrl: '',
    apps: {},
    bootData: {},
    buildInfo: { version: '13.2.3', edition: 'oss', env: 'production' },
    datasources: {},
    defaultDatasource: 'prometheus',
    featureToggles: {},
    panels: {},
  },
  user: { locale: 'en-US', timezone: 'utc', theme: 'light', lightTheme: true, isSignedIn: true, permissions: {} },
  navTree: [],
};

Object.assign(window, { grafanaBootData: boot, __grafana_public_path__: '/public/' });

export {};
