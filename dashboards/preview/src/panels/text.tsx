// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
import { PanelProps, renderMarkdown } from '@grafana/data';

import { record } from './common';

export function TextPanel(props: PanelProps<any>) {
  record('text', props);
  const html = renderMarkdown(props.replaceVariables(props.options.content ?? ''));
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}
