// Command images makes pictures of the documentation: SVG, from data that it makes itself.
//
//	go run ./docs/images burst      # docs/images/burst.svg: what weir simulate says of bursts at a boundary
//	go run ./docs/images restart    # docs/images/restart.svg: a rolling restart under load, 40 s
//
// It is to be run in the root of the tree.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(2)
	}
}

func run(ctx context.Context, args []string) error {
	makers := map[string]func(context.Context) ([]byte, error){"burst": burst, "restart": restart}
	if len(args) == 0 {
		return errors.New("say which picture to make: burst or restart")
	}
	for _, name := range args {
		picture, known := makers[name]
		if !known {
			return fmt.Errorf("there is no picture %q: there are burst and restart", name)
		}
		svg, err := picture(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join("docs", "images", name+".svg"), svg, 0o644); err != nil {
			return err
		}
	}
	return nil
}
