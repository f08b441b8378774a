// Command images draws docs/images/burst.svg: what weir simulate says of bursts at a boundary.
//
//	go run ./docs/images
//
// It is to be run in the root of the tree.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	svg, err := burst()
	if err == nil {
		err = os.WriteFile(filepath.Join("docs", "images", "burst.svg"), svg, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(2)
	}
}
