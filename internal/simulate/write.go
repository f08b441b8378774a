package simulate

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Write writes the report: with charts to the file html, where that is not empty, - being stdout, and otherwise to stdout as a table or
// JSON.
func (r *Report) Write(stdout io.Writer, html string, asJSON bool) error {
	switch html {
	case "":
	case "-":
		return r.WriteHTML(stdout)
	default:
		file, err := os.Create(html)
		if err != nil {
			return fmt.Errorf("html: %w", err)
		}
		if err := errors.Join(r.WriteHTML(file), file.Close()); err != nil {
			return fmt.Errorf("html: %w", err)
		}
	}
	if asJSON {
		return r.WriteJSON(stdout)
	}
	return r.WriteTable(stdout)
}
