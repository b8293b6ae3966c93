// A Quasar table that compiles the templates of its cells once.
// NiceGUI compiles a slot's template whenever it draws the table, so each update replaces all cells: the focus is lost,
// and a click or key press that has begun has no effect.
import { convertDynamicProperties } from "../../static/utils/dynamic_properties.js";

export default {
  template: `
    <q-table :columns="shownColumns">
      <template v-for="(cell, slot) in cells" v-slot:[slot]="props"><component :is="cell" :props="props" /></template>
    </q-table>`,
  props: { columns: Array, templates: Object },
  computed: {
    shownColumns() {
      return this.columns.map((column) => {
        const shown = { ...column };
        convertDynamicProperties(shown, false);
        return shown;
      });
    },
  },
  created() {
    const compiled = ([slot, template]) => [slot, { props: ["props"], template }];
    this.cells = Object.fromEntries(Object.entries(this.templates).map(compiled));
  },
};
