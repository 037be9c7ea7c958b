// The parts of ECharts that charts use. `.ci/renew_assets` makes echarts.min.js of them.

import { BarChart, CustomChart, LineChart, ParallelChart, ScatterChart } from "echarts/charts";
import { GridComponent, MarkLineComponent, ParallelComponent, TooltipComponent } from "echarts/components";
import { color, init, use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

use([BarChart, CustomChart, LineChart, ParallelChart, ScatterChart, CanvasRenderer]);
use([GridComponent, MarkLineComponent, ParallelComponent, TooltipComponent]);
globalThis.echarts = { color, init };
